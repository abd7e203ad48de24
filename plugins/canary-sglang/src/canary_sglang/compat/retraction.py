"""Requests taken from the scheduler before they get a token, as SGLang retracts them when memory runs out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from importlib.util import find_spec
from typing import Any

from canary_sglang.compat import caches, disaggregated, progress, schedulers


def retract(scheduler: Any, request: Any) -> None:
    """Takes a running request's slots, as SGLang does when memory runs out. The request's KV does not enter the prefix
    cache, and the next token is passed by. `leave_out` takes the request from the batches."""
    given = len(request.output_ids)
    # The cache gives back slots of known tokens. Those of a batch under way are not known yet.
    unknown = schedulers.allocated_tokens(request) - len(request.origin_input_ids) - given
    request.output_ids.extend([0] * unknown)
    try:
        progress.release(request, scheduler.tree_cache)
    finally:
        del request.output_ids[given:]
    request.reset_for_retract()
    if scheduler.chunked_req is request:
        scheduler.chunked_req = None


def may_be_retracted(request: Any) -> bool:
    """Whether a running request has slots of its own to give back. A beam search or a streaming session shares
    slots with others."""
    return not schedulers.searches_beams(request) and schedulers.streaming_session(request) is None


def may_go_on(scheduler: Any, request: Any) -> bool:
    """Whether a retracted request may be queued again with the tokens given out so far: not one
    ended by the client, nor one with a grammar, nor one with embeddings as a prompt, begun anew by SGLang. A PD
    engine has no KV to begin with, or has been asked for a single token."""
    if disaggregated.side(scheduler) != "null":
        return False
    if request.to_finish is not None or getattr(scheduler, "_pending_chunked_abort_req", None) is request:
        return False
    return getattr(request, "grammar", None) is None and not (schedulers.embedded(request) and request.output_ids)


def queue(scheduler: Any, request: Any) -> None:
    """Queues a retracted request again, as SGLang does, but asks no storage back end for the prompt: the same may come
    again. A full queue ends the request with an error of its own."""
    usual = getattr(scheduler, "enable_hicache_storage", False)
    if usual:
        scheduler.enable_hicache_storage = False
    try:
        scheduler._add_request_to_queue(request, is_retracted=True)
    finally:
        if usual:
            scheduler.enable_hicache_storage = usual


def end(scheduler: Any, request: Any, message: str) -> None:
    """Ends a retracted request at once: the client gets ``message`` with status 503, or the reason why the request ends
    anyway, and no token more."""
    from sglang.srt.managers.io_struct import AbortReq

    request.finished_reason = request.to_finish or schedulers.corrupted(message)
    request.finished_output = True
    told = AbortReq(rid=request.rid, finished_reason=request.finished_reason.to_json())
    # Where SGLang's server is in Rust, it does not listen to the tokenizer's channel.
    send = getattr(scheduler, "send_abort_output", None) or scheduler.ipc_channels.send_to_tokenizer.send_output
    send(told, request)


def leave_out(requests: Sequence[Any], *batches: Any) -> None:
    """Takes ``requests`` from ``batches``, which may be None."""
    if not requests:
        return
    gone = set(map(id, requests))
    for batch in {id(batch): batch for batch in batches if batch is not None}.values():
        kept = [i for i, request in enumerate(batch.reqs) if id(request) not in gone]
        if len(kept) < len(batch.reqs):
            batch.filter_batch(keep_indices=kept)
        # There is room for others now, whichever of the batches had the requests.
        batch.batch_is_full = False


def under_way(scheduler: Any, request: Any) -> bool:
    """Whether the overlap scheduler has a batch with ``request`` whose result is not taken yet."""
    return any(request in batch.reqs for batch in schedulers.batches_under_way(scheduler))


def made(scheduler: Any) -> Sequence[Any]:
    """Requests of the overlap scheduler's next batch, where it was made and not issued before a result is taken: of
    two prefills in a row, where SGLang lets them not overlap."""
    batch = getattr(scheduler, "cur_batch_for_debug", None) or getattr(scheduler, "cur_batch", None)
    if not scheduler.enable_overlap or batch is None or schedulers.batches_under_way(scheduler):
        return ()
    requests: Sequence[Any] = batch.reqs
    return requests


@contextmanager
def passing_by_retracted(scheduler: Any) -> Iterator[None]:
    """Context: rows of retracted requests in a decode's result are passed by, as SGLang does with the overlap scheduler
    only. In a prefill's result they always are."""
    usual = scheduler.batch_result_processor
    # It has no state of its own.
    scheduler.batch_result_processor = replace(usual, enable_overlap=True)
    try:
        yield
    finally:
        scheduler.batch_result_processor = usual


def counts_logprobs(batch: Any) -> bool:
    """Whether the result of ``batch`` has log-probabilities of prompts, which SGLang takes row by row."""
    return batch is not None and bool(batch.return_logprob) and batch.forward_mode.is_extend()


def withholding_refusal(scheduler: Any, states: bool) -> str | None:
    """Why a request can't be retracted before its token is given out, None if it can. ``states``: whether the model has
    recurrent states."""
    args = scheduler.server_args
    for name, reason in (("enable_hisparse", "HiSparse"), ("dllm_algorithm", "a diffusion model")):
        if getattr(args, name, None):
            return f"{reason} takes its tokens in another way"
    if not scheduler.is_generation:
        return "an embedding model gives out no tokens"
    known = is_dataclass(getattr(scheduler, "batch_result_processor", None))
    if not known:
        return "this SGLang takes results in another way"
    return _speculation_refusal(scheduler) or (_states_refusal(scheduler) if states else None)


def _speculation_refusal(scheduler: Any) -> str | None:
    """As `withholding_refusal`, of several tokens a step."""
    algorithm = schedulers.speculation(scheduler)
    if algorithm == "NONE":
        return None
    # Older workers put the tokens in the request within the forward.
    if algorithm not in schedulers.SPECULATION or find_spec("sglang.srt.speculative.eagle_worker") is not None:
        return f"speculative decoding by {algorithm} takes its tokens in another way"
    if _spreads(scheduler) or caches.keeps_host_copies(scheduler):
        return "speculative decoding beside HiCache, PD disaggregation, a pipeline or data-parallel attention"
    return None


def _states_refusal(scheduler: Any) -> str | None:
    """As `withholding_refusal`, of a model with recurrent states."""
    speculates = schedulers.speculation(scheduler) != "NONE"
    if speculates or _spreads(scheduler) or caches.keeps_host_copies(scheduler):
        return "recurrent states beside speculation, HiCache, PD disaggregation, a pipeline or data-parallel attention"
    cache = scheduler.tree_cache
    if cache.supports_mamba() and not caches.names_nodes(cache):
        return f"a {type(cache).__name__} with recurrent states offers no choice of nodes"
    return None


def _spreads(scheduler: Any) -> bool:
    """Whether engines or schedulers other than tensor-parallel ones share the work on a request."""
    if schedulers.is_staged(scheduler) or getattr(scheduler.server_args, "enable_dp_attention", False):
        return True
    return disaggregated.side(scheduler) != "null"
