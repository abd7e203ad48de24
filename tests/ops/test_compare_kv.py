"""The KV of slots against the same KV computed again: relative errors, the same bits from both back ends."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from canary_core import CanaryConfig, KVSource, Region
from canary_core.ops.backends import torch_backend, triton_backend
from canary_core.ops.state import RegionState, Shared
from canary_core.recomputer import Computed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
SCALED = (torch.int8, torch.float8_e4m3fn)
HEADS, DIM = 3, 22
"""An odd number of elements: several rounds of lanes, the last one cut."""


def paged(values: torch.Tensor, half: str, layer: int, page: int) -> KVSource:
    """``values`` (``[slots, heads, dim]``) laid out page by page, heads first within a page."""
    slots, heads, dim = values.shape
    pages = -(-slots // page)
    tensor = torch.zeros(pages * page, heads, dim, dtype=values.dtype, device=values.device)
    tensor[:slots] = values
    tensor = tensor.view(pages, page, heads, dim).transpose(1, 2).contiguous()
    size = values.element_size()
    return KVSource(
        tensor, half, layer, chunk_bytes=dim * size, slot_stride_bytes=dim * size, page_size=page,
        page_stride_bytes=heads * page * dim * size, chunks=heads, chunk_stride_bytes=page * dim * size,
        dtype=values.dtype,
    )  # fmt: skip


def rows(values: torch.Tensor, half: str, layer: int) -> KVSource:
    """The same as plain rows."""
    size = values.element_size() * values[0].numel()
    return KVSource(values, half, layer, chunk_bytes=size, slot_stride_bytes=size, dtype=values.dtype)


def scaled(values: torch.Tensor, dtype: torch.dtype, layer: int) -> KVSource:
    """``values`` in ``dtype``, with a float32 scale behind the numbers of each head, as vLLM has scales per token and
    head."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    scales = (values.float().nan_to_num(0, 9, -9).abs().amax(2, keepdim=True) / largest).clamp(min=1e-6)
    numbers = (values.float() / scales).nan_to_num(0, largest, -largest)
    numbers = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
    pad = torch.zeros(*values.shape[:2], -values.shape[2] % 4, dtype=torch.int8, device=values.device)
    parts = [numbers.view(torch.int8), pad, scales.view(torch.int8)]
    tensor = torch.cat(parts, 2).contiguous()
    head = tensor.shape[2]
    return KVSource(
        tensor, "v", layer, chunk_bytes=head, slot_stride_bytes=head * values.shape[1], chunks=values.shape[1],
        chunk_stride_bytes=head, scaled=dtype,
    )  # fmt: skip


def state_of(sources: tuple[KVSource, ...], slots: int, device: str = "cpu") -> RegionState:
    """The state of a region of them."""
    config = CanaryConfig.load(bytes="off")
    return RegionState(Region("kv", slots, sources), 0, Shared.allocate(config, torch.device(device)), config)


def setting(seed: int, device: str):
    """A pool in pages, and rows computed elsewhere in another order, with errors, and floats that are none."""
    random = torch.Generator().manual_seed(seed)
    slots, count = 70, 37
    held, again = [], []
    where = torch.randperm(slots, generator=random)[:count]
    elsewhere = torch.randperm(count, generator=random)
    for layer, dtype in enumerate(SCALED):
        values = torch.randn(slots, HEADS, 24, generator=random) * torch.rand(slots, HEADS, 1, generator=random)
        own = torch.zeros(count, HEADS, 24)
        own[elsewhere] = values[where] * 1.05
        held.append(scaled(values.to(device), dtype, layer))
        again.append(scaled(own.to(device), dtype, layer))
    for layer, (mine, theirs) in enumerate(itertools.product(DTYPES, DTYPES)):
        values = torch.randn(slots, HEADS, DIM, generator=random).to(mine)
        own = torch.zeros(count, HEADS, DIM)
        own[elsewhere] = values[where].float() + 0.01 * torch.randn(count, HEADS, DIM, generator=random)
        own[elsewhere[3], 0, layer % DIM] = torch.nan
        own[elsewhere[4], 1, 2], values[where[4], 1, 2] = torch.inf, torch.nan
        values[where[5]] = torch.inf
        held.append(paged(values.to(device), "k", layer, page=8))
        again.append(rows(own.to(theirs).to(device), "k", layer))
    where[7], elsewhere[8] = -1, -1
    return state_of(tuple(held), slots, device), where.to(device), Computed(tuple(again), elsewhere.to(device))


def both(state, slots, computed, columns=None):
    """What each back end gives."""
    columns = range(len(computed.sources)) if columns is None else columns
    made = []
    for backend in (torch_backend(), triton_backend()):
        out = torch.full((2, len(columns), len(slots)), -7.0, device=slots.device)
        backend.compare_kv(state, columns, slots, computed, out)
        made.append(out)
    return made


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6))
def test_kernel_equals_reference(seed):
    """In every pair of element types, with layouts unlike each other, on the interpreter."""
    reference, kernel = both(*setting(seed, "cpu"))
    assert torch.equal(reference, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_kernel_equals_reference_on_the_gpu(seed):
    """The same, compiled."""
    reference, kernel = both(*setting(seed, "cuda"))
    assert torch.equal(reference, kernel)


def test_errors_are_those_of_plain_arithmetic():
    """The root of the ratio is the relative L2 error of the values themselves, of chosen columns in a given order."""
    random = torch.Generator().manual_seed(1)
    values = [torch.randn(9, HEADS, DIM, generator=random) for _ in range(3)]
    other = [v + 0.1 * torch.randn(v.shape, generator=random) for v in values]
    state = state_of(tuple(paged(v, "v", n, page=4) for n, v in enumerate(values)), 9)
    slots = torch.tensor([8, 0, 3])
    computed = Computed(tuple(rows(other[n][slots], "v", n) for n in (2, 0)), torch.arange(3))
    for out in both(state, slots, computed, columns=[2, 0]):
        for i, n in enumerate((2, 0)):
            wanted = (values[n] - other[n])[slots].flatten(1).norm(dim=1) / other[n][slots].flatten(1).norm(dim=1)
            assert torch.allclose((out[0, i] / out[1, i]).sqrt(), wanted, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_all_bit_patterns_of_eight_bits_are_the_numbers_of_torch(dtype):
    """Zeros of both signs, the smallest numbers, infinities; NaN is none."""
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits.view(dtype).float()
    state = state_of((rows(bits.view(dtype)[:, None, None].contiguous(), "k", 0),), 256)
    nothing = torch.zeros(256, 1, 1)
    for out in both(state, torch.arange(256), Computed((rows(nothing, "k", 0),), torch.arange(256))):
        wanted = torch.where(values.isfinite(), values * values, torch.inf)
        assert torch.equal(out[0, 0], wanted)


@pytest.mark.parametrize("dtype", SCALED)
def test_a_scale_of_a_token_and_head_is_a_factor(dtype):
    """Numbers that are all 5 % larger have equal bytes but for the scale: the error is 5 %."""
    values = torch.randn(8, HEADS, 24)
    held, again = scaled(1.05 * values, dtype, 0), scaled(values, dtype, 0)
    assert torch.equal(held.tensor[:, :, :24], again.tensor[:, :, :24])
    for out in both(state_of((held,), 8), torch.arange(8), Computed((again,), torch.arange(8))):
        assert torch.allclose((out[0, 0] / out[1, 0]).sqrt(), torch.full((8,), 0.05), rtol=1e-3)


def test_equal_bits_give_zero_and_what_is_not_finite_on_one_side_infinity():
    """NaN beside NaN is no difference, NaN beside a number is, and no sum is ever NaN; a slot without bytes gives 0."""
    values = torch.randn(6, HEADS, DIM)
    values[2, 0, 0] = torch.nan
    other = values.clone()
    other[3, 1, 1] = torch.nan
    state = state_of((rows(values, "k", 0),), 6)
    for out in both(state, torch.tensor([0, 1, 2, 3, -1, 5]), Computed((rows(other, "k", 0),), torch.arange(6))):
        assert out[0, 0].tolist() == [0, 0, 0, torch.inf, 0, 0]
        assert not out.isnan().any()
        assert out[1, 0, 4] == 0
        assert bool((out[1, 0, [0, 1, 2, 3, 5]] > 0).all())
