"""What we know of SGLang's insides, and how releases differ: names of functions and attributes appear here, in
`pool` and in `tree` only.

| what                                     | releases                                                             |
|------------------------------------------|----------------------------------------------------------------------|
| `ModelRunner.alloc_memory_pool`          | 0.5.14 and later; before, `init_memory_pool`                         |
| `ModelRunner.post_capture_resize_kv_pool`| from 0.5.17: a pool may get its memory only after graphs are captured|
| `ForwardBatch`, `Scheduler.run_batch`,   | what is used of them runs on each of 0.5.14 - 0.5.23                 |
| `on_idle`, `flush_cache`                 |                                                                      |
| allocators' lists of free pages          | `release_pages`, in the paged one `staged_pages` from 0.5.2x;        |
|                                          | `free_segment` from 0.5.17, `free_page_ids` from 0.5.21;             |
|                                          | `restore_state` up to 0.5.14                                         |
| DSA's indexer                            | `index_k_with_scale_buffer`: a list, from 0.5.21 a property          |
| `NSATokenToKVPool`                       | called `DSATokenToKVPool` from 0.5.14                                |
| `HybridCacheController.start_loading`    | to 0.5.20 a method of its own, then that of `HiCacheController`      |
"""

import http
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
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
TURN = f"{SCHEDULER}.get_next_batch_to_run"

REQUIRED = (ALLOCATE, FORWARD, RUN_BATCH, FLUSH, IDLE, STATE_COPY, STATE_LOAD, TURN)
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

BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
COMMON = "sglang.srt.mem_cache.common"
ALLOCATORS = "sglang.srt.mem_cache.allocator"

PREPARES = (f"{BATCH}.prepare_for_extend", f"{BATCH}.prepare_for_decode")
"""Where slots are handed out to the requests of a batch."""

RELEASES = (f"{COMMON}.release_kv_cache", f"{COMMON}.maybe_cache_unfinished_req")
"""Where a request, the first argument, gives up slots."""

CLEAR, MERGE, RESTORE = "clear", "merge_and_sort_free", "restore_state"
ALLOCS = frozenset({"alloc", "alloc_extend", "alloc_decode"})
APPENDING_ALLOCATORS = frozenset({"TokenToKVPoolAllocator"})
"""What comes back goes to the end of their list; others put it in front."""

ALLOCATED_REGIONS = {"full": "full", "c4": "full", "c128": "full", "swa": "window"}
"""Regions whose slots an allocator hands out, and by which of its two lists."""

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


def allocator_functions() -> Sequence[str]:
    """All functions of allocators that change their list of free pages, as far as they exist. Imports the engine."""
    token, paged = f"{ALLOCATORS}.TokenToKVPoolAllocator", f"{ALLOCATORS}.PagedTokenToKVPoolAllocator"
    one, many = ("alloc", "free", CLEAR, MERGE, RESTORE), ("alloc_extend", "alloc_decode", "free_group_end")
    # The innermost of those that take back parts of a row.
    parts = "free_page_ids" if _exists(f"{paged}.free_page_ids") else "free_segment"
    names = [*(f"{token}.{name}" for name in one), *(f"{paged}.{name}" for name in (*one, *many, parts))]
    return existing(names)


def existing(names: Iterable[str]) -> list[str]:
    """Those of the functions that this SGLang has."""
    return [name for name in names if _exists(name)]


def lifetime_refusal(runner: Any) -> str | None:
    """Why the allocator is not followed though we know it, None if it is."""
    args = runner.server_args
    if getattr(args, "speculative_algorithm", None):
        return "speculative decoding hands slots out ahead of their use; not followed yet"
    if getattr(args, "enable_hierarchical_cache", False):
        return "HiCache moves KV between slots; not followed yet"
    if getattr(args, "disaggregation_mode", "null") != "null":
        return "PD disaggregation; not followed yet"
    return None


def free_lists(allocator: Any) -> dict[str, Any]:
    """The allocators that keep the lists of free pages, by the lists of `ALLOCATED_REGIONS`; none of those that we
    don't know. Recognised by the exact class: one derived from it may keep its list in another way."""
    known = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
    kind = type(allocator).__name__
    lists = {"full": allocator}
    if kind == "SWATokenToKVPoolAllocator":
        lists = {"full": allocator.full_attn_allocator}
        if not getattr(allocator, "swa_req_ring", False):
            lists["window"] = allocator.swa_attn_allocator
    elif kind == "PureSWATokenToKVPoolAllocator":
        lists = {"window": allocator.swa_attn_allocator}
    return {name: part for name, part in lists.items() if type(part).__name__ in known}


def released_pages(allocator: Any) -> Sequence[torch.Tensor]:
    """Pages that came back and wait to be sorted in; a list of them from 0.5.2x on, before that one tensor."""
    staged = getattr(allocator, "staged_pages", None)
    if staged is not None:
        pages: Sequence[torch.Tensor] = staged
        return pages
    return () if allocator.release_pages is None else (allocator.release_pages,)


def page_shares(name: str, allocator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int] | None:
    """How many new pages each row of a batch gets from the call ``name`` with these arguments; None where it doesn't
    say. From lengths on the host."""
    size = int(allocator.page_size)
    ends = kwargs.get("seq_lens_cpu")
    if name == "alloc_extend":
        ends = args[3] if ends is None and len(args) > 3 else ends
        begins = kwargs.get("prefix_lens_cpu", args[1] if len(args) > 1 else None)
    elif name == "alloc_decode":
        ends = args[1] if ends is None and len(args) > 1 else ends
        begins = None if ends is None else ends - 1
    else:
        return None
    if ends is None or begins is None:
        return None
    shares: list[int] = ((ends + size - 1) // size - (begins + size - 1) // size).tolist()
    return shares


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
    if algorithm.upper() not in ("EAGLE", "EAGLE3", "NEXTN"):
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


def running_requests(scheduler: Any) -> list[Any]:
    """Requests that have slots or are about to get some, unfinished, in the order of their names."""
    batches = [scheduler.running_batch, scheduler.last_batch, getattr(scheduler, "cur_batch", None)]
    found = {id(request): request for batch in batches if batch is not None for request in batch.reqs}
    if scheduler.chunked_req is not None:
        found[id(scheduler.chunked_req)] = scheduler.chunked_req
    return sorted((r for r in found.values() if not r.finished()), key=lambda request: str(request.rid))


def table_row(scheduler: Any, request: Any) -> tuple[torch.Tensor | None, int]:
    """A request's row of the slot table, and how many entries of it are its own; None before it has one."""
    kv = getattr(request, "kv", None)
    holder = request if hasattr(request, "req_pool_idx") else kv
    index = getattr(holder, "req_pool_idx", None)
    if index is None:
        return None, 0
    length = getattr(kv if hasattr(kv, "kv_allocated_len") else request, "kv_allocated_len", 0)
    return scheduler.req_to_token_pool.req_to_token[index], int(length)


def abort(scheduler: Any, request: Any, message: str) -> bool:
    """Ends a running request after its next forward, as SGLang ends one that is aborted or times out: its client gets
    ``message`` with status 503, and what it computed does not enter the prefix cache. False if it ends already."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if request.finished() or request.to_finish is not None:
        return False
    request.to_finish = FINISH_ABORT(message, http.HTTPStatus.SERVICE_UNAVAILABLE, "KVCacheCorrupted")
    # A chunked prefill goes on from what it put into the cache, so it ends with its last chunk.
    if request is not scheduler.chunked_req and len(request.output_ids):
        request.skip_radix_cache_insert = True
    return True


def deciding_group(scheduler: Any) -> tuple[Any, str | None]:
    """Process group, on the host, of the ranks that schedule the same batches in step, None for a lone one; and why
    ranks can't decide alike here, if they can't."""
    args = scheduler.server_args
    if getattr(args, "pp_size", 1) > 1:
        return None, "the stages of a pipeline are at different batches; nothing is aborted or evicted with pp_size > 1"
    if getattr(args, "disaggregation_mode", "null") != "null":
        return None, "with PD disaggregation another engine holds or awaits the same KV; nothing is aborted or evicted"
    group = scheduler.tp_cpu_group
    if getattr(args, "enable_dp_attention", False):
        if getattr(args, "attn_cp_size", 1) > 1:
            return None, "data-parallel attention with attn_cp_size > 1; nothing is aborted or evicted there"
        group = scheduler.attn_tp_cpu_group
    lone = not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1
    return (None if lone else group), None


def keeps_host_copies(scheduler: Any) -> bool:
    """Whether what is evicted from the device may come back from host memory."""
    args = scheduler.server_args
    return any(getattr(args, name, False) for name in ("enable_hierarchical_cache", "enable_lmcache"))


def cached_slots(cache: Any) -> torch.Tensor | None:
    """Full slots of all tokens in the prefix cache; None where there are none."""
    size = cache.total_size() if hasattr(cache, "all_values_flatten") else 0
    if not (size[0] if isinstance(size, tuple) else size):
        return None
    slots: torch.Tensor = cache.all_values_flatten()
    return slots


def evict_nodes(cache: Any, doomed: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Evicts the nodes of which `doomed` marks a slot, and all below them, as far as they are not in use; gives the
    number of tokens. Where the kind of cache doesn't let us choose, all that is not in use."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    if type(cache).__name__ != "RadixCache":
        full = cache.full_evictable_size() if cache.supports_swa() else cache.evictable_size()
        window = cache.swa_evictable_size() if cache.supports_swa() else 0
        if not full and not window:
            return 0
        return int(cache.evict(EvictParams(num_tokens=full, swa_num_tokens=window)).num_tokens_evicted)
    order = _Doomed(cache.root_node, doomed)
    if not order.tokens:
        return 0
    usual = cache.eviction_strategy
    cache.eviction_strategy = order
    try:
        return int(cache.evict(EvictParams(num_tokens=order.tokens)).num_tokens_evicted)
    finally:
        cache.eviction_strategy = usual


class _Doomed:
    """An eviction strategy of `RadixCache` under which chosen nodes go first, those below before those above.
    ``tokens``: how many those have that are not in use."""

    def __init__(self, root: Any, doomed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._nodes: set[int] = set()
        self.tokens = 0
        todo = [(node, False) for node in root.children.values()]
        while todo:
            node, under = todo.pop()
            under = under or bool(doomed(node.value).any())
            if under and node.lock_ref == 0:
                self._nodes.add(node.id)
                self.tokens += len(node.value)
            todo += [(child, under) for child in node.children.values()]

    def get_priority(self, node: Any) -> int:
        """Lower goes first."""
        return 0 if node.id in self._nodes else 1


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
