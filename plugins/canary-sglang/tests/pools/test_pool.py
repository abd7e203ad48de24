"""SGLang's own pool classes, made here: which bytes of them are regions, and what is named as left out."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from canary_sglang.pools.compressor_state import RequestCompressorStates
from canary_sglang.pools.pool import SGLangPool
from tools.made_pools import COMMON, describe

from canary_core import BatchView, Canary, CanaryConfig, tensors_of
from canary_core.ops.torch import plan
from canary_core.records import Status
from canary_core.region import RegionKind

pytestmark = [
    pytest.mark.older_release,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("pools"),
]


def test_tensors_are_named_by_sglangs_own_attributes(pools):
    """Whatever a pool holds, but for indices; the pool of requests has none but those. Its bytes are all covered."""
    pool = pools.MHATokenToKVPool(
        size=16, page_size=4, dtype=torch.bfloat16, head_num=2, head_dim=8, layer_num=2, **COMMON
    )
    assert any(t.dtype in (torch.int64, torch.uint64) for t in tensors_of(pool).values())
    requests = SimpleNamespace(req_to_token=torch.zeros(4, 8, dtype=torch.int32))
    runner = SimpleNamespace(token_to_kv_pool=pool, sliding_window_size=None, req_to_token_pool=requests)
    adapter = SGLangPool(runner)
    names = {f"token_to_kv_pool.{half}_buffer[{layer}]" for half in "kv" for layer in range(2)}
    assert adapter.pool_tensors().keys() == names
    canary = Canary(
        adapter.regions(), CanaryConfig.load(), uncovered=adapter.uncovered(), pool_tensors=adapter.pool_tensors
    )
    assert (canary.coverage.ratio, canary.uncovered) == (1, ())
    canary.close()


def test_reserved_addresses_are_not_named(pools):
    """Behind the end of such a pool there is no memory to compare."""
    pool = SimpleNamespace(post_capture_active=True, layer_num=0, k_buffer=[torch.zeros(4)])
    assert SGLangPool(SimpleNamespace(token_to_kv_pool=pool, sliding_window_size=None)).pool_tensors() == {}


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

    numbers = torch.tensor([1, 2])
    view = BatchView(prefix_lens=numbers, new_lens=numbers, token_ids=numbers, writers=numbers, tables={})
    rings = RequestCompressorStates("c128_state", SimpleNamespace(regions=regions))
    table = rings.before(SimpleNamespace(req_pool_indices=numbers), view).tables["c128_state"]
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
