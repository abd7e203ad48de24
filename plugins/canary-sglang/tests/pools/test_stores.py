"""Regions are where SGLang's own functions store, on its own pools made here: no more, no less; a flip is found."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canary_sglang.pools import mamba
from tools.made_pools import COMMON, describe, flip

from canary_adapters import slot_table
from canary_core.batch import BatchView
from canary_core.config import CanaryConfig
from canary_core.guard.canary import Canary
from canary_core.region import Region
from canary_core.testing import read_bytes, write_bytes

pytestmark = [
    pytest.mark.older_release,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("pools"),
]


def row(slots: torch.Tensor, *shape: int) -> torch.Tensor:
    """Random content of ``slots``, where they are."""
    return torch.randn(len(slots), *shape, device=slots.device).to(torch.bfloat16)


def store_kv(pool: Any, slots: torch.Tensor, heads: int = 2, dim: int = 32) -> None:
    """K and V of all layers, as an attention layer stores them."""
    for layer in range(pool.layer_num):
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, row(slots, heads, dim), row(slots, heads, dim))


def store_pages(pool: Any, slots: torch.Tensor) -> None:
    """K and V of all layers into the pool's own views of its pages: SGLang's kernel for them needs a GPU."""
    for view in (*pool.k_buffer, *pool.v_buffer):
        view[slots // pool.page_size, slots % pool.page_size] = row(slots, 2, 32)


def store_latent(pool: Any, slots: torch.Tensor) -> None:
    """Latents of all layers."""
    for layer in range(pool.layer_num):
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, row(slots, 1, 288), row(slots, 1, 256))


def store_mxfp8(pool: Any, slots: torch.Tensor) -> None:
    """K and V of all layers, which SGLang's kernel, in the interpreter here, turns into rows and scales."""
    for layer in range(pool.layer_num):
        # The interpreter does not know how to compute with bfloat16.
        rows = (row(slots, 2, 128).to(torch.bfloat16 if slots.is_cuda else torch.float32) for _ in range(2))
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, *rows)


def store_minimax(pool: Any, slots: torch.Tensor) -> None:
    """K and V of a dense and two sparse layers, and what their indexers store."""
    for layer in range(3):
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, row(slots, 2, 32), row(slots, 2, 32))
    pool.set_index_kv_buffer(SimpleNamespace(layer_id=1), slots, row(slots, 1, 32), row(slots, 1, 32))
    pool.set_index_k_buffer(SimpleNamespace(layer_id=2), slots, row(slots, 1, 32))


FAR_SLOTS = torch.tensor([129, 170, 133, 255, 300, 2])
"""In all pages, and where a page's slots are interleaved in all quarters of one."""
MHA = dict(size=32, head_num=2, head_dim=32, layer_num=2, **COMMON)
STORES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "rows": ("MHATokenToKVPool", {**MHA, "page_size": 1, "dtype": torch.bfloat16}, store_kv),
    "pages": ("MHATokenToKVPool", {**MHA, "page_size": 4, "dtype": torch.bfloat16}, store_kv),
    "fp8": ("MHATokenToKVPool", {**MHA, "page_size": 1, "dtype": torch.float8_e4m3fn}, store_kv),
    "heads first": ("MHATokenToKVPool", {**MHA, "page_size": 4, "dtype": torch.bfloat16}, store_kv),
    "page-major": ("PageMajorMHATokenToKVPool", {**MHA, "page_size": 4, "dtype": torch.bfloat16}, store_pages),
    "latent": (
        "MLATokenToKVPool",
        dict(
            size=32, page_size=1, dtype=torch.bfloat16, kv_lora_rank=256, qk_rope_head_dim=32, layer_num=2, **COMMON
        ),
        store_latent,
    ),
    "fp4": ("MHATokenToKVPoolFP4", {**MHA, "page_size": 1, "dtype": torch.float4_e2m1fn_x2}, store_kv),
    "latent fp4": (
        "MLATokenToKVPoolFP4",
        dict(
            size=32, page_size=1, dtype=torch.float4_e2m1fn_x2, kv_lora_rank=256, qk_rope_head_dim=32, layer_num=2,
            **COMMON,
        ),
        store_latent,
    ),
    "mxfp8": (
        "MHATokenToKVPoolMXFP8",
        {**MHA, "size": 256, "page_size": 128, "dtype": torch.float8_e4m3fn, "head_dim": 128},
        store_mxfp8,
    ),
    "minimax": (
        "MiniMaxSparseKVPool",
        dict(
            size=32, page_size=1, dtype=torch.bfloat16, head_num=2, head_dim=32, idx_head_dim=32, device="cpu",
            dense_layer_ids=[0], sparse_layer_ids=[1, 2], disable_value_sparse_layer_ids=[2], start_layer=0,
            end_layer=3,
        ),
        store_minimax,
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", STORES)
def test_a_region_is_where_sglang_stores(pools, findings, monkeypatch, case, device):
    """SGLang's own store changes exactly the bytes that the regions give to these slots; then all is clean, until one
    bit flips, in any source of any region: that is found and named."""
    name, values, store = STORES[case]
    values = {**values, "device": device}
    if case == "heads first":
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    kind = getattr(pools, name, None)
    if kind is None:
        pytest.skip(f"this SGLang has no {name}")
    try:
        pool = kind(**values)
    except NotImplementedError as error:
        pytest.skip(f"this SGLang has no {name} that can be made: {error}")
    adapter = describe(pool)
    regions = adapter.regions()
    assert adapter.uncovered() == ()
    if case == "heads first":
        assert {source.chunks for source in regions[0].sources} == {2}

    slots = (FAR_SLOTS if case == "mxfp8" else torch.tensor([7, 8, 5])).to(device)
    canary = Canary(regions, CanaryConfig.load(scrub_budget="1MiB", non_finite=False))
    before = {region.name: stored_bytes(region) for region in regions}
    outside = unlisted_bytes(regions)
    batch = forward_of(slots, regions)
    canary.step.before(batch)
    # FP4's rows are made by a function that would be compiled first.
    with torch.compiler.set_stance("force_eager"):
        store(pool, slots)
    canary.step.after(batch)
    canary.drain()
    assert findings.violations == []
    for region in regions:
        changed = (stored_bytes(region) != before[region.name]).any(1).nonzero()[:, 0]
        assert changed.tolist() == sorted(own_slots(region, slots).tolist())
    assert torch.equal(unlisted_bytes(regions), outside)

    for region in regions:
        slot = int(own_slots(region, slots)[1])
        for source in region.sources:
            flip(source, slot)
            nothing = forward_of(slots[:0], regions)
            canary.step.run(lambda: None, lambda view=nothing: view)
            canary.drain()
            told = [(v.kind.name, v.region, v.slot, v.source) for v in findings.violations]
            assert told == [("BYTES", region.name, slot, source.name)]
            flip(source, slot)
            findings.violations.clear()
    canary.close()


def own_slots(region: Region, slots: torch.Tensor) -> torch.Tensor:
    """The region's slots of those in the engine's tables."""
    return slots if region.slot_map is None else region.slot_map[slots].long()


def forward_of(slots: torch.Tensor, regions: Any) -> BatchView:
    """One request that writes its first tokens to ``slots``."""
    count = torch.tensor([len(slots)], device=slots.device)
    entries = slots[None] if len(slots) else torch.zeros_like(count)[None]
    return BatchView(
        prefix_lens=torch.zeros_like(count),
        new_lens=count,
        token_ids=torch.arange(3, 3 + len(slots), device=slots.device),
        writers=torch.zeros_like(count),
        tables={region.name: slot_table(entries) for region in regions},
    )


def stored_bytes(region: Region) -> torch.Tensor:
    """All bytes of all slots, as the region finds them."""
    every = torch.arange(region.slots, device=region.device)
    return torch.cat([read_bytes(source, every) for source in region.sources], 1)


def unlisted_bytes(regions: Any) -> torch.Tensor:
    """What lies in the pool's tensors and is no live slot's: all bytes with those of the slots zeroed."""
    storages = {s.tensor.untyped_storage().data_ptr(): s.tensor.untyped_storage() for r in regions for s in r.sources}
    whole = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages.values()]
    kept = [content.clone() for content in whole]
    for region in regions:
        every = torch.arange(region.slots, device=region.device)
        for source in region.sources:
            write_bytes(source, every, torch.zeros(region.slots, source.slot_bytes, dtype=torch.uint8).to(every.device))
    rest = torch.cat(whole)
    for content, before in zip(whole, kept, strict=True):
        content.copy_(before)
    return rest


@pytest.mark.beyond_ci("an older SGLang")
def test_states_of_lightning_attention(pools, findings):
    """Linear attention without a convolution, on SGLang's real pool with forwards by hand, since such a model does not
    start on a CPU: states that are rewritten and copied are clean, and a flip in each source of a running request's
    state and of a cached one is found and named."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=0, n_groups=0, num_heads=2, head_dim=8, state_size=8, conv_kernel=1
    )  # fmt: skip
    layers = [0, 2]
    params = Mamba2CacheParams(shape=shape, layers=layers)
    pool = pools.MambaPool(size=6, spec_state_size=0, cache_params=params, mamba_layer_ids=layers, device="cpu")
    adapter = mamba.state_pool(pool, layers)
    (region,) = adapter.regions()
    assert [source.name for source in region.sources] == ["ssm.0", "ssm.2"]
    assert adapter.uncovered() == ()
    canary = Canary([region], CanaryConfig.load(scrub_budget="1MiB", state_interval=1))
    numbers = torch.tensor([0, 4, 5], dtype=torch.int32)
    requests = SimpleNamespace(mamba_pool=pool, req_index_to_mamba_index_mapping=numbers)
    states = mamba.MambaStates(requests, region.name, canary)
    lengths = torch.zeros(2, dtype=torch.int64)

    def forward(new: int) -> None:
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name="EXTEND" if new > 1 else "DECODE"), req_pool_indices=torch.tensor([1, 2]),
            input_ids=torch.arange(3, 3 + 2 * new), mamba_cow_src_indices=None, mamba_cow_dst_indices=None,
            mamba_track_indices=None, mamba_track_mask=None,
        )  # fmt: skip
        news = torch.full_like(lengths, new)
        view = BatchView(
            prefix_lens=lengths.clone(),
            new_lens=news,
            token_ids=batch.input_ids,
            writers=torch.tensor([0, 1]),
            tables={},
        )
        canary.step.before(states.before(batch, view))
        pool.mamba_cache.temporal[:, 4:] += torch.randn(len(layers), 3, *pool.mamba_cache.temporal.shape[2:])
        canary.step.after()
        canary.drain()
        lengths.add_(new)

    try:
        for new in (3, 1, 1):
            forward(new)
        cached = torch.tensor([4]), torch.tensor([2])
        pool.copy_from(*cached)
        mamba.copied(None, pool, *cached)
        forward(1)
        assert findings.violations == []
        for source in region.sources:
            for slot in (2, 4):
                flip(source, slot)
                forward(1)
                told = {(v.kind.name, v.slot, v.layer, v.half) for v in findings.violations}
                assert told == {("BYTES", slot, source.layer, "ssm")}
                if slot == 2:
                    flip(source, slot)
                findings.violations.clear()
    finally:
        states.close()
        canary.close()
