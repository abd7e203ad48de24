"""`compare_weights`: kernel and reference leave the same bits, on odd sizes, odd addresses and flipped bytes."""

import random

import pytest
import torch
from ops.scenario import scenario
from torch import Tensor

from canary_core import CanaryConfig
from canary_core.ops.backends import torch_backend, triton_backend
from canary_core.ops.fingerprint_keys import FingerprintKeys
from canary_core.ops.kernels import weights as kernels
from canary_core.ops.weights import CHUNK_BYTES, ROOM, WeightRange, WeightTable

SIZES = (1, 3, 100, 1000, 4096, 70_000, CHUNK_BYTES, 2 * CHUNK_BYTES + 5, 18 * CHUNK_BYTES - 1)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several loads for each chunk."""
    monkeypatch.setattr(kernels, "WORDS", 1024)


def memory(seed: int, device: str) -> list[Tensor]:
    """Random bytes of each size, at any address."""
    draw = torch.Generator().manual_seed(seed)
    offsets = torch.randint(0, 20, (len(SIZES),), generator=draw).tolist()
    return [
        torch.randint(0, 256, (size + offset,), dtype=torch.uint8, generator=draw).to(device)[offset:]
        for size, offset in zip(SIZES, [0, 16, *offsets[2:]], strict=True)
    ]


def table(tensors: list[Tensor]) -> WeightTable:
    """Of each tensor a range."""
    ranges = [WeightRange(tensor.data_ptr(), len(tensor), tensor.detach) for tensor in tensors]
    return WeightTable(ranges, tensors[0].device, FingerprintKeys.of(CanaryConfig.load()))


def rows(one: WeightTable) -> list[list[int]]:
    """What was noted, in any order."""
    count = int(one.found[0, 0])
    return [[count], *sorted(one.found[1 : 1 + min(count, ROOM)].tolist())]


def run(seed: int, device: str) -> None:
    """Takes all fingerprints, compares parts, and all after bytes have changed."""
    draw, state = random.Random(seed), scenario(seed, device).state()
    tensors = memory(seed, device)
    one, other = table(tensors), table(tensors)
    both = ((one, torch_backend()), (other, triton_backend()))
    for known, backend in both:
        backend.compare_weights(state, known, 0, known.chunks)
    assert bool((one.fingerprints != 0).all())
    for _ in range(3):
        for tensor in tensors:
            for _ in range(draw.randrange(3)):
                tensor[draw.randrange(len(tensor))] ^= 1 << draw.randrange(8)
        first = draw.randrange(one.chunks)
        part = first, draw.randint(1, one.chunks - first)
        for place in (part, (0, one.chunks)):
            for known, backend in both:
                known.begin()
                backend.compare_weights(state, known, *place)
            assert torch.equal(one.fingerprints, other.fingerprints)
            assert rows(one) == rows(other)
        anew = draw.randrange(len(tensors))
        for known, _ in both:
            known.forget(anew)
    for known, backend in both:
        known.leave_out(4)
        known.begin()
        backend.compare_weights(state, known, 0, known.chunks)
    assert torch.equal(one.fingerprints, other.fingerprints)


@pytest.mark.parametrize("seed", range(2))
def test_the_kernel_equals_its_reference(seed):
    """In fingerprints taken and in differences noted, of all chunks and of some."""
    run(seed, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_equals_its_reference_on_the_gpu(seed):
    """The same, compiled."""
    run(seed, "cuda")


@pytest.mark.parametrize("backend", [torch_backend, triton_backend])
def test_no_more_rows_than_there_is_room_for(backend):
    """The count goes on; nothing is written behind the last row."""
    tensors = [torch.zeros(4096, dtype=torch.uint8) for _ in range(9)]
    known, state = table(tensors), scenario(1).state()
    assert known.chunks > ROOM + 5
    found = torch.full((1 + ROOM + 3, 2), -7)
    found[0] = 0
    known.found = found[: 1 + ROOM]
    backend().compare_weights(state, known, 0, known.chunks)
    for tensor in tensors:
        tensor.fill_(1)
    backend().compare_weights(state, known, 0, known.chunks)
    assert int(found[0, 0]) == known.chunks
    assert bool((found[1 + ROOM :] == -7).all())
    assert bool((found[1 : 1 + ROOM, 0] >= 0).all())
