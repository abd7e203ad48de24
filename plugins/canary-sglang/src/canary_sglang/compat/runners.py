"""`ModelRunner`: options, and obstacles to a guard."""

from collections.abc import Container
from typing import Any

import torch

from canary_sglang.compat.attention import leaves
from canary_sglang.compat.drafts import draft_refusal
from canary_sglang.compat.switches import switched_on


def refusal(runner: Any) -> str | None:
    """Why the runner can't be guarded without false alarms, None if it can."""
    args = runner.server_args
    reason = draft_refusal(runner) if runner.is_draft_worker else None
    if reason is not None:
        return reason
    if getattr(args, "enable_lmcache", False):
        return "LMCache loads KV without a forward; not covered yet"
    if getattr(args, "enable_hisparse", False):
        return "HiSparse moves KV between host and device without a forward; not covered yet"
    if getattr(args, "dcp_size", 1) > 1 or getattr(args, "decode_context_parallel_size", 1) > 1:
        return "decode context parallelism spreads a sequence's slots over ranks; not covered yet"
    if runner.model_config.is_encoder_decoder:
        return "an encoder-decoder model keeps two sequences in one table row; not covered yet"
    if _encoder_only(runner):
        return "encoder-only attention needs no KV, so some back ends store none in the slots that are handed out"
    return None


def draft_name(runner: Any) -> str | None:
    """The name of a draft model in findings and events; None for the served model. Drafts of several layers have a
    runner for each layer."""
    if not runner.is_draft_worker:
        return None
    index = getattr(runner, "draft_model_idx", None)
    return f"draft{index}" if index else "draft"


def awaits_resize(runner: Any) -> bool:
    """Whether the pool's memory is only reserved until `RESIZE`. An earlier access would crash."""
    return bool(getattr(runner.token_to_kv_pool, "post_capture_active", False))


def captures_graphs(runner: Any) -> bool:
    """Whether the engine captures CUDA graphs at its start. No forward is guarded meanwhile."""
    return not _option(runner, "disable_cuda_graph", False)


def host_cache(runner: Any) -> bool:
    """Whether HiCache moves the pool's KV to host memory and back."""
    return bool(_option(runner, "enable_hierarchical_cache", False))


def lmcache(runner: Any) -> bool:
    """Whether LMCache moves the pool's KV elsewhere and back."""
    return bool(_option(runner, "enable_lmcache", False))


def speculates(runner: Any) -> bool:
    """Whether a draft model, or a table of n-grams, proposes tokens to be verified by the served model."""
    return bool(_option(runner, "speculative_algorithm", None))


def scales_refusal(runner: Any) -> str | None:
    """Why interleaved scales, a region of their own, can't be guarded with the runner; None if they can."""
    if host_cache(runner) or disaggregation(runner) != "null":
        return "interleaved scales come without a forward; not followed"
    return None


def compressor_state_refusal(runner: Any) -> str | None:
    """Why the rings of DeepSeek-V4's compressors can't be guarded without false alarms, None if they can."""
    if _option(runner, "speculative_algorithm", None):
        return "speculative decoding clears rows of rejected tokens; not covered yet"
    if disaggregation(runner) == "decode":
        return "a PD decode engine receives them without a forward; not covered yet"
    if torch.version.hip is not None:
        return "AMD's compressors store them in another way; not described"
    # Later releases have only the newer compressor.
    newer = switched_on("SGLANG_OPT_USE_COMPRESSOR_V2", absent=True)
    if not newer or switched_on("SGLANG_OPT_USE_OLD_COMPRESSOR"):
        return "an older compressor is switched on; not described"
    return None


def parks_retracted(runner: Any) -> bool:
    """Whether a PD decode engine stores the KV of retracted requests in HiCache's host pools, possible from 0.5.21."""
    parked = _option(runner, "disaggregation_decode_retraction_backup", None)
    return bool(disaggregation(runner) == "decode" and parked == "host_pool")


def disaggregation(runner: Any) -> str:
    """The engine's side of PD disaggregation: ``prefill``, ``decode``, or ``null``."""
    return str(_option(runner, "disaggregation_mode", "null"))


def records_may_travel(runner: Any) -> bool:
    """Whether buffers appended to those of a transfer reach the other engine. They do with NIXL, the only back end
    whose code was read, and without pipeline stages, which each send a part of the decode engine's list."""
    backend = _option(runner, "disaggregation_transfer_backend", None)
    return bool(backend == "nixl" and _option(runner, "pp_size", 1) == 1)


def window_tokens(runner: Any) -> int | None:
    """How many positions a token attends to in a sliding-window layer, itself included (SGLang leaves it out). None for
    a model without windows."""
    size = runner.sliding_window_size
    return None if size is None or size < 0 else int(size) + 1


def most_rows(runner: Any) -> int:
    """Most requests of a forward: the rows of the table, without the one for padding."""
    return int(runner.req_to_token_pool.req_to_token.shape[0]) - 1


def adapters(runner: Any) -> Container[str]:
    """Ids of the LoRA adapters that are loaded."""
    loaded: Container[str] = getattr(getattr(runner, "lora_manager", None), "loras", ())
    return loaded


def is_elastic(runner: Any) -> bool:
    """Whether ranks may join and leave while the engine runs."""
    return bool(_option(runner, "elastic_ep_backend", None))


def served_model(runner: Any) -> str:
    """The engine's served name of its model (``--served-model-name``), empty without one."""
    return str(_option(runner, "served_model_name", None) or "")


def _option(runner: Any, name: str, default: Any) -> Any:
    """An option of the engine; ``default`` if unknown to the installed release."""
    return getattr(getattr(runner, "server_args", None), name, default)


def _encoder_only(runner: Any) -> bool:
    model = getattr(runner, "model", None)
    kinds = (getattr(module, "attn_type", None) for module in (model.modules() if model is not None else ()))
    return any(getattr(kind, "name", None) == "ENCODER_ONLY" for kind in kinds)


def window_refusal(runner: Any) -> str | None:
    """Why KV in a window's own pool is not what the model computes from the tokens, None if nothing speaks against
    it."""
    backend = getattr(runner, "attn_backend", None)
    if any(type(leaf).__name__ == "TorchNativeAttnBackend" for leaf in leaves(backend)):
        return "torch_native stores a window's KV in slots of its own and reads it by the numbers of the full pool"
    return None
