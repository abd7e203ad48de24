"""Requests of PD engines, and their ends before, in and after a transfer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

CORRUPTED = "the KV cache of this request is corrupted"
"""Begins the error of a request ended for a finding, in the prefill and in the decode engine."""


def side(scheduler: Any) -> str:
    """The engine's side of PD disaggregation: ``prefill``, ``decode``, or ``null``."""
    return str(getattr(scheduler.server_args, "disaggregation_mode", None) or "null")


class _Holding:
    """SGLang's ``streamer`` for ended requests; unfinished requests are put into ``held``."""

    def __init__(self, streamer: Any, held: list[Any]) -> None:
        self._streamer = streamer
        self._held = held

    def stream_output(self, requests: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        """Gives out the tokens of ended requests."""
        self._held += [request for request in requests if not request.finished()]
        ended = [request for request in requests if request.finished()]
        if ended:
            self._streamer.stream_output(ended, *args, **kwargs)


def begin_holding(begin: Callable[..., Any], processor: Any, batch: Any, held: list[Any]) -> Any:
    """A decode engine begins the requests of ``batch``, with first tokens of the prefill engine. Unfinished requests
    are put into ``held``, and the tokens are kept back."""
    # The processor has no state of its own.
    return begin(replace(processor, output_streamer=_Holding(processor.output_streamer, held)), batch)


def give_out(scheduler: Any, batch: Any, held: list[Any]) -> list[Any]:
    """Gives out the tokens of ``held`` requests in ``batch``, and returns the rest."""
    due = [request for request in held if request in batch.reqs and not request.finished()]
    if due:
        scheduler.output_streamer.stream_output(due, batch.return_logprob)
    return [request for request in held if not (request in due or request.finished())]


def in_transfer(scheduler: Any) -> Sequence[Any]:
    """Requests of a prefill engine whose KV is computed, and sent or about to be."""
    return tuple(getattr(scheduler, "disagg_prefill_inflight_queue", None) or ())


def fail(scheduler: Any, request: Any, reason: Any) -> bool:
    """Ends a request of a prefill engine for ``reason``, a ``FINISH_ABORT``, as SGLang ends one whose transfer has
    failed: nothing more is sent, and the decode engine is told why. False if the request ends already."""
    if request.finished() or request.to_finish is not None:
        return False
    if request is not scheduler.chunked_req:
        # The next chunk of a prompt goes on from the ones before in the cache.
        request.skip_radix_cache_insert = True
    sent = any(one is request for one in in_transfer(scheduler))
    if sent:
        # The scheduler finds that the transfer has failed, and keeps this reason.
        request.finished_reason = reason
    else:
        request.to_finish = reason
    sender = request.disagg_kv_sender
    if hasattr(sender.kv_mgr, "conclude_failure"):
        sender.kv_mgr.conclude_failure(bootstrap_room=request.bootstrap_room, failure_reason=reason.message)
    if sent:
        sender.abort()
    return True


def failure(request: Any) -> str | None:
    """Why a prefill engine ended the request, from the error of a failed transfer in a decode engine; None if it was
    not for a finding."""
    _, begin, rest = str(getattr(request.finished_reason, "message", "")).partition(CORRUPTED)
    return begin + rest if begin else None
