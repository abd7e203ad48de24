"""SGLang's own pool classes, made here: which bytes of them are regions, and what is named as left out."""

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canary_sglang import states
from canary_sglang.pool import SGLangPool
from canary_sglang.rings import RequestRings

from canary_adapters import slot_table
from canary_core import plugins
from canary_core.batch import BatchView
from canary_core.canary import Canary
from canary_core.config import CanaryConfig
from canary_core.faults import read_bytes, write_bytes
from canary_core.hookspecs import hookimpl
from canary_core.records import Status
from canary_core.reference import plan
from canary_core.region import Region, RegionKind
from canary_core.violation import Violation

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("pools")]

COMMON = dict(device="cpu", enable_memory_saver=False)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SGLang's module of pools, with the global arguments that some of them ask for."""
    from sglang.srt.server_args import ServerArgs

    folder = tmp_path_factory.mktemp("model")
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=256, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    folder.joinpath("config.json").write_text(json.dumps(config))
    args = ServerArgs(model_path=str(folder), device="cpu", attention_backend="torch_native", skip_tokenizer_init=True)
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    try:
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    except ImportError:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
    else:
        ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), dp_rank=None, gpu_id=0)
        publish(args, role="scheduler", ranks=ranks)
    from sglang.srt.mem_cache import memory_pool

    return memory_pool


class Findings:
    """Keeps what a `Canary` found."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        self.violations.append(violation)


@pytest.fixture
def findings() -> Any:
    """What is found during the test."""
    listener = Findings()
    plugins.manager().register(listener)
    yield listener.violations
    plugins.manager().unregister(listener)


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
    canary.pre_forward(batch)
    # FP4's rows are made by a function that would be compiled first.
    with torch.compiler.set_stance("force_eager"):
        store(pool, slots)
    canary.post_forward(batch)
    canary.drain()
    assert findings == []
    for region in regions:
        changed = (stored_bytes(region) != before[region.name]).any(1).nonzero()[:, 0]
        assert changed.tolist() == sorted(own_slots(region, slots).tolist())
    assert torch.equal(unlisted_bytes(regions), outside)

    for region in regions:
        slot = int(own_slots(region, slots)[1])
        for source in region.sources:
            flip(source, slot)
            canary.post_forward(forward_of(slots[:0], regions))
            canary.drain()
            told = [(v.kind.name, v.region, v.slot, v.source) for v in findings]
            assert told == [("BYTES", region.name, slot, source.name)]
            flip(source, slot)
            findings.clear()
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


def flip(source: Any, slot: int) -> None:
    """One bit of a slot."""
    where = torch.tensor([slot], device=source.tensor.device)
    content = read_bytes(source, where)
    content[0, source.slot_bytes // 2] ^= 4
    write_bytes(source, where, content)


def describe(pool: Any, window: int | None = None) -> SGLangPool:
    """The adapter for a pool, as a runner would hold it."""
    return SGLangPool(SimpleNamespace(token_to_kv_pool=pool, sliding_window_size=window))


def test_mha_in_fp8_with_pages(pools):
    """fp8 is kept as bytes, whose type is known: every row but none twice, the padding page included."""
    pool = pools.MHATokenToKVPool(
        size=16, page_size=4, dtype=torch.float8_e4m3fn, head_num=2, head_dim=8, layer_num=2, **COMMON
    )
    adapter = describe(pool)
    (region,) = adapter.regions()
    assert (region.slots, region.null_slot, region.slot_bytes) == (20, 0, 2 * 2 * 2 * 8)
    assert {source.dtype for source in region.sources} == {torch.float8_e4m3fn}
    assert adapter.uncovered() == ()


def test_fp4_with_its_scales(pools):
    """Packed halves and block scales are sources of their own."""
    pool = pools.MHATokenToKVPoolFP4(
        size=16, page_size=1, dtype=torch.bfloat16, head_num=2, head_dim=32, layer_num=1, **COMMON
    )
    adapter = describe(pool)
    (region,) = adapter.regions()
    assert [source.name for source in region.sources] == ["k.0", "v.0", "k_scale.0", "v_scale.0"]
    assert {source.dtype for source in region.sources} == {None}
    assert adapter.uncovered() == ()


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 576), (torch.float8_e4m3fn, 656)])
def test_dsa_rows_and_indexer(pools, dtype, dim):
    """Latent rows and the indexer's packed pages, keys and scales, have the same slots."""
    more = {"skip_topk_layers": [False, False]} if hasattr(pools.DSATokenToKVPool, "skip_topk_layers") else {}
    pool = pools.DSATokenToKVPool(
        size=128, page_size=64, kv_lora_rank=512, dtype=dtype, qk_rope_head_dim=64, layer_num=2, index_head_dim=128,
        kv_cache_dim=dim, **COMMON, **more,
    )  # fmt: skip
    adapter = describe(pool)
    (region,) = adapter.regions()
    assert [source.name for source in region.sources[:3]] == ["kv.0", "index.0", "index_scale.0"]
    assert region.slots == 192
    assert region.slot_bytes == 2 * (dim * (2 if dtype is torch.bfloat16 else 1) + 132)
    assert adapter.uncovered() == ()


@pytest.fixture
def deepseek_v4(pools):
    """A pool of DeepSeek-V4's with one layer of each sort, and one c4 layer more."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    wanted = inspect.signature(DeepSeekV4TokenToKVPool.__init__).parameters
    values = dict(
        max_num_reqs=2, swa_size=512, c4_size=128, c128_size=4, c4_state_pool_size=64, c128_state_pool_size=256,
        page_size=256, swa_page_size=256, dtype=torch.float8_e4m3fn, c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32, state_dtype=torch.float32, qk_nope_head_dim=448, qk_rope_head_dim=64,
        indexer_head_dim=128, layer_num=4, compression_ratios=[0, 4, 128, 4], **COMMON,
    )  # fmt: skip
    pool = DeepSeekV4TokenToKVPool(**{name: value for name, value in values.items() if name in wanted})
    pool.register_mapping(torch.zeros(512 + 256 + 1, dtype=torch.int64))
    return pool


def test_deepseek_v4_sub_pools(deepseek_v4):
    """The window and both compressed pools with the indexer, scale strips included, and the compressors' rings."""
    regions = {region.name: region for region in describe(deepseek_v4, window=127).regions()}
    assert list(regions) == ["swa", "c4", "c128", "c4_state", "c128_state"]
    assert regions["swa"].kind is RegionKind.WINDOW
    assert regions["swa"].window_tokens == 128
    assert regions["swa"].slot_bytes == 4 * 584
    assert [source.name for source in regions["c4"].sources[:2]] == ["kv.1", "kv_scale.1"]
    assert regions["c4"].slot_bytes == 2 * (584 + 132)
    assert (regions["c4"].tokens_per_slot, regions["c128"].tokens_per_slot) == (4, 128)
    assert regions["c128"].slot_bytes == 584
    names = [
        f"{half}.{layer}" for index in ("", "index_") for layer in (1, 3) for half in (f"{index}kv", f"{index}score")
    ]
    assert [source.name for source in regions["c4_state"].sources] == names
    assert regions["c4_state"].slot_bytes == 2 * 4 * (512 + 128) * 4
    assert [source.name for source in regions["c128_state"].sources] == ["kv.2", "score.2"]
    assert regions["c128_state"].slot_bytes == 2 * 512 * 4


def test_deepseek_v4s_rings_are_where_sglang_says(deepseek_v4):
    """Rows of a page's ring and of a request's are those of SGLang's own translations, for every slot and request."""
    regions = {region.name: region for region in describe(deepseek_v4, window=127).regions()}
    paged, own = (deepseek_v4.compress_state_pools[layer] for layer in (1, 2))
    slots = torch.arange(512 + 256)
    assert torch.equal(regions["c4_state"].rows(slots), paged.translate_from_swa_loc_to_state_loc(slots))
    assert regions["c4_state"].slots == 3 * paged.ring_size
    assert not bool((regions["c4_state"].rows(slots) >= regions["c4_state"].slots).any())

    table = RequestRings("c128_state", SimpleNamespace(regions=regions)).table(torch.tensor([1, 2]))
    for row, request in enumerate((1, 2)):
        positions = torch.arange(300)
        places = plan.Places(torch.full_like(positions, row), positions)
        found, status = plan.lookup(regions["c128_state"], table, places)
        expected = own.translate_from_req_position_to_state_loc(torch.full_like(positions, request), positions)
        assert torch.equal(found, expected)
        assert set(status.tolist()) == {int(Status.OK)}


@pytest.mark.parametrize(
    ("about", "said"),
    [({"speculative_algorithm": "EAGLE"}, "speculative"), ({"disaggregation_mode": "decode"}, "PD decode")],
)
def test_deepseek_v4s_rings_that_something_else_writes_are_left_out(deepseek_v4, about, said):
    """Where not only the compressors of a forward write to them: named, with the reason, and the rest is guarded."""
    runner = SimpleNamespace(
        token_to_kv_pool=deepseek_v4, sliding_window_size=127, server_args=SimpleNamespace(**about)
    )
    adapter = SGLangPool(runner)
    assert [region.name for region in adapter.regions()] == ["swa", "c4", "c128"]
    left_out = {item.name: item for item in adapter.uncovered() if item.name.endswith("_state")}
    assert set(left_out) == {"c4_state", "c128_state"}
    assert all(item.size_bytes and said in item.reason for item in left_out.values())


def test_deepseek_v4s_rings_of_another_length_are_left_out(deepseek_v4):
    """As speculation makes them: their rows would not be those that are described."""
    for state in deepseek_v4.compress_state_pools:
        if state is not None and state.ratio == 4:
            state.ring_size = 16
    adapter = describe(deepseek_v4, window=127)
    assert [region.name for region in adapter.regions()] == ["swa", "c4", "c128", "c128_state"]
    assert {item.name for item in adapter.uncovered()} >= {"c4_state"}


def test_mxfp8_scales_that_come_without_a_forward(pools):
    """Of pages of 128 the scales are a region of their own, and left out, with the reason, where HiCache or PD would
    bring them: rows stay guarded."""
    if not hasattr(pools, "MHATokenToKVPoolMXFP8"):
        pytest.skip("this SGLang has no MHATokenToKVPoolMXFP8")
    values = dict(size=128, page_size=128, dtype=torch.float8_e4m3fn, head_num=2, head_dim=64, layer_num=2, **COMMON)
    pool = pools.MHATokenToKVPoolMXFP8(**values)
    assert [region.name for region in describe(pool).regions()] == ["full", "full_scale"]
    args = SimpleNamespace(enable_hierarchical_cache=True)
    adapter = SGLangPool(SimpleNamespace(token_to_kv_pool=pool, sliding_window_size=None, server_args=args))
    (region,) = adapter.regions()
    assert [source.name for source in region.sources] == ["k.0", "v.0", "k.1", "v.1"]
    assert region.slot_bytes == 2 * 2 * 2 * 64
    (left_out,) = adapter.uncovered()
    assert (left_out.name, left_out.size_bytes) == ("full_scale", 2 * 2 * 256 * 2 * 2)


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
    adapter = states.StatePool(pool, layers)
    (region,) = adapter.regions()
    assert [source.name for source in region.sources] == ["ssm.0", "ssm.2"]
    assert adapter.uncovered() == ()
    canary = Canary([region], CanaryConfig.load(scrub_budget="1MiB", state_interval=1))
    numbers = torch.tensor([0, 4, 5], dtype=torch.int32)
    requests = SimpleNamespace(mamba_pool=pool, req_index_to_mamba_index_mapping=numbers)
    guard = states.StateGuard(requests, region.name, canary)
    lengths = torch.zeros(2, dtype=torch.int64)

    def forward(new: int) -> None:
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name="EXTEND" if new > 1 else "DECODE"), req_pool_indices=torch.tensor([1, 2]),
            input_ids=torch.arange(3, 3 + 2 * new), mamba_cow_src_indices=None, mamba_cow_dst_indices=None,
            mamba_track_indices=None, mamba_track_mask=None,
        )  # fmt: skip
        news = torch.full_like(lengths, new)
        table = guard.table(batch, lengths, news)
        view = BatchView(
            prefix_lens=lengths.clone(),
            new_lens=news,
            token_ids=batch.input_ids,
            writers=torch.tensor([0, 1]),
            tables={region.name: table},
        )
        canary.pre_forward(view)
        pool.mamba_cache.temporal[:, 4:] += torch.randn(len(layers), 3, *pool.mamba_cache.temporal.shape[2:])
        canary.post_forward(view)
        canary.drain()
        lengths.add_(new)

    try:
        for new in (3, 1, 1):
            forward(new)
        cached = torch.tensor([4]), torch.tensor([2])
        pool.copy_from(*cached)
        states.copied(None, pool, *cached)
        forward(1)
        assert findings == []
        for source in region.sources:
            for slot in (2, 4):
                flip(source, slot)
                forward(1)
                told = {(v.kind.name, v.slot, v.layer, v.half) for v in findings}
                assert told == {("BYTES", slot, source.layer, "ssm")}
                if slot == 2:
                    flip(source, slot)
                findings.clear()
    finally:
        guard.close()
        canary.close()


def test_an_unknown_sub_pool_leaves_the_others_guarded(pools):
    """A sliding-window pool whose full half is of a class that we don't know: named, and the window is guarded."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    class MyFullPool(pools.MHATokenToKVPool):
        pass

    pool = SWAKVPool(
        size=32, size_swa=16, page_size=1, dtype=torch.bfloat16, head_num=2, head_dim=8, swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1], device="cpu",
    )  # fmt: skip
    pool.full_kv_pool.__class__ = MyFullPool
    pool.register_mapping(torch.zeros(34, dtype=torch.int64))
    adapter = describe(pool, window=7)
    (region,) = adapter.regions()
    assert (region.name, region.kind, region.window_tokens) == ("swa", RegionKind.WINDOW, 8)
    (left_out,) = adapter.uncovered()
    assert left_out.name == "full"
    assert left_out.size_bytes >= 33 * 2 * 2 * 8 * 2
    assert "MyFullPool" in left_out.reason


def test_unknown_pools_are_named():
    """A class that we don't know, also one derived from a known one, is left alone, with its size and the reason."""

    class MyPool:
        layer_num = 1

    adapter = describe(MyPool())
    assert adapter.regions() == ()
    (left_out,) = adapter.uncovered()
    assert "MyPool" in left_out.reason
