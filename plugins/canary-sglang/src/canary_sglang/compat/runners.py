"""`ModelRunner`: what serves, how it was started, and whether that can be guarded."""

from typing import Any

import torch

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
    """What a draft model is called in findings and events, None for the model that is served. Multi-layer drafts have
    a runner for each layer."""
    if not runner.is_draft_worker:
        return None
    index = getattr(runner, "draft_model_idx", None)
    return f"draft{index}" if index else "draft"


def awaits_resize(runner: Any) -> bool:
    """Whether the pool's memory is reserved only, until `RESIZE`: touching it would crash."""
    return bool(getattr(runner.token_to_kv_pool, "post_capture_active", False))


def host_cache(runner: Any) -> bool:
    """Whether HiCache moves the pool's KV to host memory and back."""
    return bool(getattr(runner.server_args, "enable_hierarchical_cache", False))


def scales_refusal(runner: Any) -> str | None:
    """Why interleaved scales, a region beside the rows, can't be guarded with this runner, None if they can."""
    args = getattr(runner, "server_args", None)
    if getattr(args, "enable_hierarchical_cache", False) or getattr(args, "disaggregation_mode", "null") != "null":
        return "interleaved scales come without a forward; not followed"
    return None


def compressor_state_refusal(runner: Any) -> str | None:
    """Why the rings of DeepSeek-V4's compressors can't be guarded without false alarms, None if they can."""
    args = getattr(runner, "server_args", None)
    if getattr(args, "speculative_algorithm", None):
        return "speculative decoding clears rows of rejected tokens; not covered yet"
    if getattr(args, "disaggregation_mode", "null") == "decode":
        return "a PD decode engine receives them without a forward; not covered yet"
    if torch.version.hip is not None:
        return "AMD's compressors store them in another way; not described"
    # Later releases have none but the newer compressor.
    newer = switched_on("SGLANG_OPT_USE_COMPRESSOR_V2", absent=True)
    if not newer or switched_on("SGLANG_OPT_USE_OLD_COMPRESSOR"):
        return "an older compressor is switched on; not described"
    return None


def parks_retracted(runner: Any) -> bool:
    """Whether a PD decode engine keeps retracted requests' KV in HiCache's host pools, as from 0.5.21 on."""
    parked = getattr(runner.server_args, "disaggregation_decode_retraction_backup", None)
    return disaggregation(runner) == "decode" and parked == "host_pool"


def disaggregation(runner: Any) -> str:
    """Which side of PD disaggregation this engine is: ``prefill``, ``decode``, or ``null``."""
    return str(getattr(runner.server_args, "disaggregation_mode", "null"))


def records_may_travel(runner: Any) -> bool:
    """Whether buffers appended to those of a transfer reach the other engine's: NIXL's lists were read, and stages of
    a pipeline each send a part of the decode engine's list."""
    args = runner.server_args
    backend = getattr(args, "disaggregation_transfer_backend", None)
    return backend == "nixl" and getattr(args, "pp_size", 1) == 1


def window_tokens(runner: Any) -> int | None:
    """How many positions a token attends to in a sliding layer, itself included. SGLang counts those before it."""
    size = runner.sliding_window_size
    return None if size is None or size < 0 else int(size) + 1


def most_rows(runner: Any) -> int:
    """How many requests a forward can have: the rows of the table but the one for padding."""
    return int(runner.req_to_token_pool.req_to_token.shape[0]) - 1


def rank() -> int:
    """Rank of this process among those that serve one model."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _encoder_only(runner: Any) -> bool:
    model = getattr(runner, "model", None)
    kinds = (getattr(module, "attn_type", None) for module in (model.modules() if model is not None else ()))
    return any(getattr(kind, "name", None) == "ENCODER_ONLY" for kind in kinds)
