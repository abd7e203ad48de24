"""SGLang's own pool classes, made here: which bytes of them are regions, and what is named as left out."""

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canary_sglang.pool import SGLangPool

from canary_core.region import RegionKind

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

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


def test_deepseek_v4_sub_pools(pools):
    """The window and both compressed pools with the indexer, scale strips included; states are named as left out."""
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
    adapter = describe(pool, window=127)
    regions = {region.name: region for region in adapter.regions()}
    assert list(regions) == ["swa", "c4", "c128"]
    assert regions["swa"].kind is RegionKind.WINDOW
    assert regions["swa"].window_tokens == 128
    assert regions["swa"].slot_bytes == 4 * 584
    assert [source.name for source in regions["c4"].sources[:2]] == ["kv.1", "kv_scale.1"]
    assert regions["c4"].slot_bytes == 2 * (584 + 132)
    assert (regions["c4"].tokens_per_slot, regions["c128"].tokens_per_slot) == (4, 128)
    assert regions["c128"].slot_bytes == 584
    left_out = {item.name.split("/")[0] for item in adapter.uncovered()}
    assert left_out >= {"compressor states", "indexer states"}


def test_unknown_pools_are_named():
    """A class that we don't know, also one derived from a known one, is left alone, with its size and the reason."""

    class MyPool:
        layer_num = 1

    adapter = describe(MyPool())
    assert adapter.regions() == ()
    (left_out,) = adapter.uncovered()
    assert "MyPool" in left_out.reason
