"""Questions to a model runner, V1 or V2."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor

from canary_core import RankGroup


def groups(runner: Any) -> Sequence[Any]:
    """The KV cache groups, in the order of block tables."""
    found: Sequence[Any] = runner.kv_cache_config.kv_cache_groups
    return found


def layers(runner: Any) -> Mapping[str, Any]:
    """Every layer with a possible cache, by vLLM's name."""
    found: Mapping[str, Any] = runner.compilation_config.static_forward_context
    return found


SCALES = ("_k_scale_float", "_v_scale_float", "_k_scale", "_v_scale")
"""A layer's scales of KV, as its backend reads them: numbers or tensors."""


def quantized(runner: Any) -> dict[str, Any]:
    """The layers of `layers` whose KV is stored by a scale."""
    scaled, found = ("fp8", "int8", "nvfp4"), layers(runner).items()
    return {name: layer for name, layer in found if str(getattr(layer, "kv_cache_dtype", "")).startswith(scaled)}


def layer_tensors(layer: Any) -> list[Tensor]:
    """The tensors of ``layer`` with KV or states; empty until bound."""
    bound = getattr(layer, "kv_cache", None)
    return [t for t in (bound if isinstance(bound, (list, tuple)) else [bound]) if isinstance(t, Tensor) and t.numel()]


def table_page(runner: Any, group: int) -> int:
    """How many slots one entry of the group's block table has: the size of the attention kernel's blocks, of which a
    block of the scheduler may have several."""
    # The V2 runner keeps its requests' state on the device.
    if not hasattr(runner, "req_states"):
        return int(runner.input_batch.block_table[group].block_size)
    tables = runner.block_tables
    # Since 0.32 only V1 splits blocks within its table.
    return int(getattr(tables, "kernel_block_sizes", tables.block_sizes)[group])


def draft_layers(runner: Any) -> frozenset[str]:
    """Names of a draft model's layers, in the served model's blocks."""
    names: set[str] = set()
    for attribute in ("draft_attn_layer_names", "_draft_attn_layer_names", "attn_layer_names"):
        names.update(getattr(drafter(runner), attribute, None) or ())
    return frozenset(names)


def drafts_refusal(runner: Any) -> str | None:
    """Why layers of a draft model can't be guarded, None for no reason."""
    config = runner.vllm_config.speculative_config
    method = str(getattr(config, "method", None))
    if method in ("eagle", "eagle3", "mtp", "draft_model") and not getattr(config, "parallel_drafting", False):
        return None
    return f"which slots a drafter of the method {method!r} writes is not known"


def encoder_lens(runner: Any) -> Any:
    """How many states of an encoder each row of the batch has, a tensor of the device; None for not known."""
    kept = getattr(getattr(runner, "encoder_seq_lens", None), "gpu", None)
    return getattr(getattr(runner, "model_state", None), "encoder_seq_lens_gpu", kept)


def drafter(runner: Any) -> Any:
    """The drafter, with or without a forward, None where there is none."""
    return getattr(runner, "speculator", None) or getattr(runner, "drafter", None)


def drafted(runner: Any) -> int:
    """How many tokens are drafted for a request in one step, 0 for none."""
    config = runner.vllm_config.speculative_config
    return int(getattr(config, "num_speculative_tokens", 0) or 0)


def samples() -> bool:
    """Whether the process samples tokens: of pipeline stages the last one does."""
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_last_rank)


def rank(vllm_config: Any) -> int:
    """Rank of the process within one replica."""
    return int(getattr(vllm_config.parallel_config, "rank", 0))


def replica(vllm_config: Any) -> int:
    """The engine's index among data-parallel replicas."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))


def group(vllm_config: Any) -> RankGroup:
    """The tensor-parallel ranks of the process's pipeline stage: one scheduler gives them their batches."""
    model, name = vllm_config.model_config, f"vllm {vllm_config.instance_id}, replica {replica(vllm_config)}"
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    return RankGroup.of(name, rank(vllm_config), vllm_config.parallel_config.tensor_parallel_size, heads)


def served_model(vllm_config: Any) -> str:
    """The first served name of the engine's model."""
    name = vllm_config.model_config.served_model_name
    return str(name[0] if isinstance(name, (list, tuple)) and name else name or "")


def refusal(runner: Any) -> str | None:
    """Why no forward of the runner can be guarded, None if all can."""
    parallel = runner.vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}: the slots of one request lie on several ranks"
    if getattr(runner.vllm_config.model_config, "is_diffusion", False):
        return "a diffusion model computes the tokens of its canvas again and again, each time others"
    sleeps = getattr(runner.vllm_config.model_config, "enable_sleep_mode", False)
    if sleeps and "kv_cache_allocation_context" not in signature(type(runner).initialize_kv_cache).parameters:
        return "in sleep mode this release throws away what is allocated with the KV cache, Canary's records among it"
    return None
