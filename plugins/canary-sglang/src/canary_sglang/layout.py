"""What we know of SGLang's insides, and how releases differ: names of functions and attributes appear here, in
`pool` and in `tree` only.

| what                                     | releases                                                             |
|------------------------------------------|----------------------------------------------------------------------|
| `ModelRunner.alloc_memory_pool`          | 0.5.14 and later; before, `init_memory_pool`                         |
| `ModelRunner.post_capture_resize_kv_pool`| from 0.5.17: a pool may get its memory only after graphs are captured|
| `ForwardBatch`, `Scheduler.run_batch`,   | what is used of them runs on each of 0.5.14 - 0.5.23                 |
| `on_idle`, `flush_cache`                 |                                                                      |
| DSA's indexer                            | `index_k_with_scale_buffer`: a list, from 0.5.21 a property          |
| `NSATokenToKVPool`                       | called `DSATokenToKVPool` from 0.5.14                                |
| `HybridCacheController.start_loading`    | to 0.5.20 a method of its own, then that of `HiCacheController`      |
"""

import os
import pkgutil
from collections.abc import Sequence
from typing import Any

import torch

from canary_core.errors import PluginError

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

ALLOCATE = f"{RUNNER}.alloc_memory_pool"
RESIZE = f"{RUNNER}.post_capture_resize_kv_pool"
FORWARD = f"{RUNNER}.forward"
RUN_BATCH = f"{SCHEDULER}.run_batch"
FLUSH = f"{SCHEDULER}.flush_cache"
IDLE = f"{SCHEDULER}.on_idle"
STATE_COPY = "sglang.srt.mem_cache.memory_pool.MambaPool.copy_from"
STATE_LOAD = "sglang.srt.mem_cache.memory_pool.MambaPool.load_cpu_copy"

REQUIRED = (ALLOCATE, FORWARD, RUN_BATCH, FLUSH, IDLE, STATE_COPY, STATE_LOAD)
OPTIONAL = (RESIZE,)

HICACHE = "sglang.srt.managers.cache_controller.HiCacheController"
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
HICACHE_WRITE = f"{HICACHE}.start_writing"
HICACHE_LOAD = f"{HICACHE}.start_loading"
HYBRID_WRITE = f"{HYBRID}.start_writing"
HYBRID_LOAD = f"{HYBRID}.start_loading"
HOST_ALLOCATE = "sglang.srt.mem_cache.pool_host.base.HostKVCache.alloc"

NIXL_MANAGER = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"
NIXL_MEET = "sglang.srt.disaggregation.nixl.conn.NixlKVManager._prepare_payload_xfer"
NIXL_SEND = "sglang.srt.disaggregation.nixl.conn.NixlKVManager._send_kvcache_generic"
PREALLOCATE = "sglang.srt.disaggregation.decode.DecodePreallocQueue._pre_alloc"
COMMIT = "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req"

DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
DRAFT_STEPS = f"{DRAFT_WORKER}.draft"
DRAFT_EXTEND = f"{DRAFT_WORKER}._draft_extend_for_decode"
VERIFY = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify"

CHECKED_MODES = frozenset({"DECODE", "EXTEND", "MIXED", "TARGET_VERIFY"})
"""Names of `ForwardMode`s whose reads and writes follow from the batch alone."""

NO_KV_MODES = frozenset({"IDLE", "PREBUILT"})
"""Forwards that write no KV."""


def targets() -> Sequence[str]:
    """Functions to hook, the required ones and those of the optional ones that exist. Imports the engine.

    Raises `PluginError` naming what is missing: SGLang itself would only log a hook that can't be applied.
    """
    missing = [name for name in REQUIRED if not _exists(name)]
    if missing:
        raise PluginError(
            f"this SGLang has no {', '.join(missing)}; install a supported release (see canary plugins) or a "
            f"canary-sglang that supports yours"
        )
    return (*REQUIRED, *(name for name in OPTIONAL if _exists(name)))


def hicache_targets() -> Sequence[str]:
    """HiCache's functions to hook: a class that inherits one is left to its base. Imports them.

    Raises `PluginError` if this SGLang has others.
    """
    names = (HICACHE_WRITE, HICACHE_LOAD, HYBRID_WRITE, HYBRID_LOAD, HOST_ALLOCATE)
    needed = (HICACHE_WRITE, HICACHE_LOAD, HOST_ALLOCATE)
    found = [name for name in names if _own(name)]
    missing = [name for name in needed if name not in found]
    if missing:
        raise PluginError(f"this SGLang's HiCache has no {', '.join(missing)}; what it loads can't be followed")
    return found


def awaits_resize(runner: Any) -> bool:
    """Whether the pool's memory is reserved only, until `RESIZE`: touching it would crash."""
    return bool(getattr(runner.token_to_kv_pool, "post_capture_active", False))


def draft_name(runner: Any) -> str | None:
    """What a draft model is called in findings and events, None for the model that is served. Multi-layer drafts have
    a runner for each layer."""
    if not runner.is_draft_worker:
        return None
    index = getattr(runner, "draft_model_idx", None)
    return f"draft{index}" if index else "draft"


def draft_refusal(runner: Any) -> str | None:
    """Why a draft model's pool can't be guarded without false alarms, None if it can: `DRAFT_WORKER` runs it, and what
    that writes is known."""
    args = runner.server_args
    algorithm = str(args.speculative_algorithm)
    if algorithm.upper() not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"):
        return f"a draft model of {algorithm}; not covered yet"
    if getattr(args, "enable_multi_layer_eagle", False):
        return "draft models of multi-layer EAGLE write each other's positions ahead; not covered yet"
    if os.environ.get("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "").lower() in ("1", "true", "yes"):
        return "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND leaves verified tokens out of the draft model's pool"
    missing = [name for name in (DRAFT_STEPS, DRAFT_EXTEND, VERIFY) if not _exists(name)]
    return f"this SGLang has no {', '.join(missing)}" if missing else None


def is_checked(batch: Any) -> bool:
    """Whether what a `ForwardBatch` reads and writes follows from it: its mode is one of `CHECKED_MODES`, and it does
    not mix extends with requests that speculate, whose lengths the overlap scheduler sets later than the host's copy.
    """
    mode = batch.forward_mode.name
    algorithm = getattr(batch, "spec_algorithm", None)
    return mode in CHECKED_MODES and not (mode == "MIXED" and algorithm is not None and not algorithm.is_none())


def is_tree(batch: Any) -> bool:
    """Whether a `ForwardBatch` verifies a tree, whose tokens share positions."""
    return bool(batch.forward_mode.name == "TARGET_VERIFY" and verified_tokens(batch) == 0)


def verified_tokens(batch: Any) -> int | None:
    """How many drafted tokens a ``TARGET_VERIFY`` writes for each request, as a chain; 0 for a tree, whose tokens share
    positions; None where that isn't known."""
    drafted = batch.spec_info
    if type(drafted).__name__ != "EagleVerifyInput":
        return None
    if drafted.topk > 1 and drafted.draft_token_num > 1:
        return 0
    return int(drafted.draft_token_num)


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


def host_cache(runner: Any) -> bool:
    """Whether HiCache moves the pool's KV to host memory and back."""
    return bool(getattr(runner.server_args, "enable_hierarchical_cache", False))


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


def _own(name: str) -> bool:
    """Whether the function exists, and its class does not only inherit it."""
    owner, _, function = name.rpartition(".")
    try:
        return function in vars(pkgutil.resolve_name(owner))
    except (ImportError, AttributeError):
        return False


def _exists(name: str) -> bool:
    try:
        return callable(pkgutil.resolve_name(name))
    except (ImportError, AttributeError):
        return False
