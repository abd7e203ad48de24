"""Full names of SGLang's functions to hook, and their presence in the installed release."""

import pkgutil
from collections.abc import Iterable, Sequence
from typing import Literal

from canary_core import HookTarget, PluginError

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
TURN = f"{SCHEDULER}.get_next_batch_to_run"
PD_TURNS = (
    "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.get_next_disagg_prefill_batch_to_run",
    "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.get_next_disagg_decode_batch_to_run",
)
"""In the place of `TURN` in the loops of PD engines."""

PD_BEGIN = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    ".process_batch_result_prebuilt"
)
"""Gives out first tokens of a prefill engine. In releases without the function, before the KV is compared."""

LOOP = f"{SCHEDULER}.run_event_loop"
STATE_CLONES = f"{RUNNER}._maybe_execute_deferred_mamba_cow_and_clear"
SAMPLE = f"{RUNNER}.sample"
PROCESS = f"{SCHEDULER}.process_batch_result"
READY = "sglang.srt.managers.tokenizer_manager.TokenizerManager.is_ready"
"""Answers SGLang's ``/ready``, in releases that have it, in the process of the HTTP server."""

REQUIRED = (ALLOCATE, FORWARD, RUN_BATCH, FLUSH, IDLE, STATE_COPY, STATE_LOAD, TURN)
OPTIONAL = (RESIZE, LOOP, STATE_CLONES, SAMPLE, PROCESS)

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
WEIGHT_LOADS = (
    f"{RUNNER}.update_weights_from_disk",
    f"{RUNNER}.update_weights_from_distributed",
    f"{RUNNER}.update_weights_from_tensor",
    f"{RUNNER}.update_weights_from_ipc",
    f"{UPDATER}.update_weights_from_disk",
    f"{UPDATER}.load_weights_from_distributed",
    f"{UPDATER}.update_weights_from_distributed",
    f"{UPDATER}.update_weights_from_tensor",
    f"{UPDATER}.update_weights_from_ipc",
)
"""Functions that load other weights into a running engine: of the runner, or in newer releases of a part of it."""

PARAMETERS: dict[str, tuple[str | None, ...]] = {
    FORWARD: ("forward_batch",),
    RUN_BATCH: ("batch",),
    STATE_LOAD: (None, "indices"),
}
"""Parameters of `REQUIRED` read by hooks."""

HICACHE = "sglang.srt.managers.cache_controller.HiCacheController"
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
HICACHE_WRITE = f"{HICACHE}.start_writing"
HICACHE_QUEUE = f"{HICACHE}.load"
HICACHE_LOAD = f"{HICACHE}.start_loading"
HYBRID_WRITE = f"{HYBRID}.start_writing"
HYBRID_QUEUE = f"{HYBRID}.load"
HYBRID_LOAD = f"{HYBRID}.start_loading"
HOST_ALLOCATE = "sglang.srt.mem_cache.pool_host.base.HostKVCache.alloc"

NIXL_MANAGER = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"
NIXL_MEET = "sglang.srt.disaggregation.nixl.conn.NixlKVManager._prepare_payload_xfer"
NIXL_SEND = "sglang.srt.disaggregation.nixl.conn.NixlKVManager._send_kvcache_generic"
PREALLOCATE = "sglang.srt.disaggregation.decode.DecodePreallocQueue._pre_alloc"
COMMIT = "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req"
PD_FAIL = "sglang.srt.disaggregation.utils.prepare_abort"

DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
DRAFT_STEPS = f"{DRAFT_WORKER}.draft"
DRAFT_EXTEND = f"{DRAFT_WORKER}._draft_extend_for_decode"
VERIFY = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify"
DRAFT_MODEL_TARGETS = (DRAFT_STEPS, DRAFT_EXTEND, VERIFY)
NGRAM = "sglang.srt.speculative.ngram_worker.NGRAMWorker.forward_batch_generation"
MOVE_ACCEPTED = "sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache"

ALLOCATORS = "sglang.srt.mem_cache.allocator"
TOKEN_ALLOCATOR, PAGED_ALLOCATOR = "TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"

BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
COMMON = "sglang.srt.mem_cache.common"

DECODES = f"{BATCH}.prepare_for_decode"
PREPARES = (f"{BATCH}.prepare_for_extend", DECODES)
"""Functions that allocate slots for the requests of a batch."""

RADIX = "sglang.srt.mem_cache.radix_cache.RadixCache"
UNIFIED = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

LOAD_BACKS = (f"{UNIFIED}.init_load_back", "sglang.srt.mem_cache.hiradix_cache.HiRadixCache.init_load_back")
"""Functions of prefix caches that queue a load from host memory for a request."""

CacheChange = Literal["lock", "unlock", "insert", "split", "evict"]
"""Effect of a call on a prefix cache: other holders of a node, or other slots in a node."""

PARKING: dict[str, CacheChange] = {
    f"{RADIX}.inc_lock_ref": "lock",
    f"{RADIX}.dec_lock_ref": "unlock",
    f"{RADIX}._insert_helper": "insert",
    f"{RADIX}._split_node": "split",
    f"{RADIX}.evict": "evict",
    f"{UNIFIED}.inc_lock_ref": "lock",
    f"{UNIFIED}.dec_lock_ref": "unlock",
    f"{UNIFIED}.insert": "insert",
    f"{UNIFIED}.evict": "evict",
    f"{UNIFIED}.evict_for_alloc": "evict",
}
"""Functions of prefix caches after which a node has other holders, or other slots."""

RELEASE = f"{COMMON}.release_kv_cache"
CHECKPOINT = (f"{COMMON}.maybe_cache_unfinished_req", f"{COMMON}.checkpoint_kv_cache")
"""The function by which a running request enters the prefix cache, to 0.5.21 and from 0.5.22 on."""

RELEASES = (RELEASE, *CHECKPOINT)
"""Functions freeing slots of a request, the first argument."""

EXPECTED = ((LOOP,), (SAMPLE,), (PROCESS,), PREPARES[:1], PREPARES[1:], (RELEASE,), CHECKPOINT)
"""Optional functions of which every supported release has one of each group."""


ALLOCATIONS = {
    "alloc_extend": (None, "prefix_lens_cpu", None, "seq_lens_cpu"),
    "alloc_decode": (None, "seq_lens_cpu"),
}
"""Functions of the paged allocator with the number of pages for each request in their parameters, listed here."""


def hook_targets() -> Sequence[HookTarget]:
    """Targets checked by the core before anything is hooked, since SGLang would only log a hook that can't be applied:
    all of `REQUIRED`, and the other functions hooked in every engine where a release has them. Without importing
    SGLang."""
    paged = f"{ALLOCATORS}.{PAGED_ALLOCATOR}"
    return (
        *(HookTarget(name, PARAMETERS.get(name, ())) for name in REQUIRED),
        *(HookTarget(name, optional=True) for name in (*OPTIONAL, *PREPARES)),
        *(HookTarget(name, ("req",), optional=True) for name in RELEASES),
        *(HookTarget(f"{paged}.{name}", read, optional=True) for name, read in ALLOCATIONS.items()),
    )


def targets() -> Sequence[str]:
    """Functions to hook in every engine: `REQUIRED`, and the existing ones of `OPTIONAL`. Imports SGLang."""
    return (*REQUIRED, *existing(OPTIONAL))


def hicache_targets() -> Sequence[str]:
    """HiCache's functions to hook. An inherited one is hooked in its base only. Imports their modules.

    Raises `PluginError` if the installed SGLang lacks the needed functions.
    """
    names = (HICACHE_WRITE, HICACHE_QUEUE, HICACHE_LOAD, HYBRID_WRITE, HYBRID_QUEUE, HYBRID_LOAD, HOST_ALLOCATE)
    needed = (HICACHE_WRITE, HICACHE_QUEUE, HICACHE_LOAD, HOST_ALLOCATE)
    found = [name for name in names if _own(name)]
    missing = [name for name in needed if name not in found]
    if missing:
        raise PluginError(f"this SGLang's HiCache has no {', '.join(missing)}; what it loads can't be followed")
    return found


def missing() -> list[str]:
    """The groups of `EXPECTED` of which the installed SGLang has none."""
    return [" or ".join(group) for group in EXPECTED if not existing(group)]


def existing(names: Iterable[str]) -> list[str]:
    """The functions of ``names`` in the installed SGLang."""
    return [name for name in names if HookTarget(name).problem() is None]


def _own(name: str) -> bool:
    """Whether the function is defined by the class in its name, not inherited."""
    owner, _, function = name.rpartition(".")
    try:
        return function in vars(pkgutil.resolve_name(owner))
    except (ImportError, AttributeError):
        return False
