"""`Scheduler` and its requests."""

import http
from typing import Any

import torch


def running_requests(scheduler: Any) -> list[Any]:
    """Requests that have slots or are about to get some, unfinished, in the order of their names."""
    batches = [scheduler.running_batch, scheduler.last_batch, getattr(scheduler, "cur_batch", None)]
    found = {id(request): request for batch in batches if batch is not None for request in batch.reqs}
    if scheduler.chunked_req is not None:
        found[id(scheduler.chunked_req)] = scheduler.chunked_req
    return sorted((r for r in found.values() if not r.finished()), key=lambda request: str(request.rid))


def table_row(scheduler: Any, request: Any) -> tuple[torch.Tensor | None, int]:
    """A request's row of the slot table, and how many entries of it are its own; None before it has one."""
    index = _row_number(request)
    if index is None:
        return None, 0
    return scheduler.req_to_token_pool.req_to_token[index], allocated_tokens(request)


def state_slot(scheduler: Any, request: Any) -> int | None:
    """In which slot a request has its recurrent state; None before it has one. Reads the device."""
    index = _row_number(request)
    return None if index is None else int(scheduler.req_to_token_pool.req_index_to_mamba_index_mapping[index])


def allocated_tokens(request: Any) -> int:
    """For how many tokens a request has slots."""
    kv = getattr(request, "kv", None)
    return int(getattr(kv if hasattr(kv, "kv_allocated_len") else request, "kv_allocated_len", 0))


def _row_number(request: Any) -> Any:
    kv = getattr(request, "kv", None)
    return getattr(request if hasattr(request, "req_pool_idx") else kv, "req_pool_idx", None)


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
