"""`SchedulerRequests`: internal requests of a scheduler like vLLM's, in the scheduler's process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from canary_adapters.recompute_requests import (
    GroupBlocks,
    InternalRequests,
    RecomputePair,
    Recomputes,
    Running,
    TouchedRequests,
    is_internal,
)
from canary_core import Event, Patches, emit

PAIRS = "canary_recompute"
"""Attribute of the scheduler's output with a list of `RecomputePair`, pickled along."""
WANTED = "canary_wanted"
"""Attribute of a runner's output with requests that somebody asks a worker for."""

MOST_OF_FREE = 2
"""An internal request gets no more than one in so many free blocks."""


class SchedulerRequests(InternalRequests):
    """Has requests of ``scheduler`` computed again, until `close`. Give each output of the scheduler to `note`, and
    each one of a runner to `hear`.

    Wraps ``schedule`` and ``update_from_output`` of ``scheduler``, and ``cache_blocks`` of the manager: from the start
    with a ``share``, else once somebody asks. Outputs and blocks of internal requests reach neither clients nor the
    prefix cache.

    ``make``: makes a request of a name, with the first tokens of another request. ``why_not``: why a request can't be
    computed again, None where it can. ``abort``: ends a request. ``share``: see `Recomputes`.
    """

    def __init__(
        self,
        scheduler: Any,
        make: Callable[[str, Any, int], Any],
        why_not: Callable[[Any], str | None],
        abort: Callable[[str], None],
        share: float,
    ) -> None:
        self._scheduler = scheduler
        self._make, self._why_not, self._abort = make, why_not, abort
        self._manager = scheduler.kv_cache_manager
        self._touched = TouchedRequests()
        self._recomputes = Recomputes(self, self._touched, share)
        self._patches = Patches()
        if share:
            self._wrap()

    def close(self) -> None:
        """Restores the scheduler, without an internal request."""
        self._recomputes.close()
        self._patches.undo()

    def note(self, output: Any) -> None:
        """The scheduler has made ``output``: takes in the requests that begin in the middle, or again. All that must be
        known before anybody asks."""
        with self._sheltered():
            self._note(output)

    def hear(self, made: Any) -> None:
        """A runner has made an output, with requests that somebody asks for."""
        wanted = getattr(made, WANTED, ())
        if wanted:
            with self._sheltered():
                self._wrap()
                for request in wanted:
                    self._recomputes.want(request)

    def running(self) -> Sequence[Running]:
        """See `InternalRequests`."""
        users = (one for one in self._scheduler.running if not is_internal(one.request_id))
        return [_running(request) for request in users if self._why_not(request) is None]

    def find(self, name: str) -> Running | None:
        """See `InternalRequests`."""
        request = self._scheduler.requests.get(name)
        return _running(request) if request is not None and request in self._scheduler.running else None

    def room(self, request: str) -> bool:
        """A seat in the batch, and free blocks: blocks of the prefix cache count as free, as for any other request."""
        blocks, free = sum(map(len, self.blocks(request))), self._manager.block_pool.get_num_free_blocks()
        seat = len(self._scheduler.running) < self._scheduler.max_num_running_reqs
        return seat and not self._scheduler.waiting and blocks * MOST_OF_FREE <= free

    def begin(self, name: str, request: str, tokens: int) -> str | None:
        """See `InternalRequests`."""
        target = self._scheduler.requests[request]
        why = self._why_not(target)
        if why is None:
            self._scheduler.add_request(self._make(name, target, tokens))
        return why

    def computed(self, name: str) -> int | None:
        """See `InternalRequests`."""
        request = self._scheduler.requests.get(name)
        return None if request is None else int(request.num_computed_tokens)

    def crowded(self, name: str) -> bool:
        """Also where it was preempted."""
        request = self._scheduler.requests.get(name)
        preempted = request is not None and bool(request.num_preemptions)
        return preempted or any(one is not request for one in self._scheduler.waiting)

    def blocks(self, name: str) -> GroupBlocks:
        """See `InternalRequests`."""
        held: GroupBlocks = self._manager.get_block_ids(name)
        return held

    def end(self, name: str) -> None:
        """As an abort of a client."""
        self._abort(name)

    def _wrap(self) -> None:
        if not self._patches.done:
            self._patches.wrap(self._scheduler, "schedule", self._schedules)
            self._patches.wrap(self._scheduler, "update_from_output", self._updates)
            self._patches.wrap(self._manager.coordinator, "cache_blocks", self._caches)

    def _schedules(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            with self._sheltered():
                self._recomputes.before()
                live, running = self._recomputes.live, self._scheduler.running
                if live and len(running) > 1:
                    # The last one of the batch is preempted first.
                    running.sort(key=lambda request: request.request_id in live)
            output = original(*args, **kwargs)
            with self._sheltered():
                pairs = self._recomputes.after(int(output.total_num_scheduled_tokens))
                if pairs:
                    setattr(output, PAIRS, pairs)
            return output

        return schedule

    def _updates(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            if self._recomputes.live:
                with self._sheltered():
                    _without(self._recomputes.live, outputs)
            return outputs

        return update

    def _caches(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def cache(request: Any, *args: Any, **kwargs: Any) -> Any:
            return None if request.request_id in self._recomputes.live else original(request, *args, **kwargs)

        return cache

    @contextmanager
    def _sheltered(self) -> Iterator[None]:
        """After an exception of ours nothing is computed again any more; none reaches the scheduler."""
        try:
            yield
        except Exception as error:
            reason = f"requests are not computed again: {type(error).__name__}: {error}"
            self._recomputes.stop(reason)
            emit(Event("hooks_left_out", "error", {"reason": reason}))

    def _note(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self._touched.ended(name)
        begun = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            begun += [(name, hit) for name, hit in computed if name in cached.resumed_req_ids]
        for name, hit in begun:
            request = self._scheduler.requests.get(name)
            self._touched.began(name, hit, request.num_tokens if request is not None and request.num_preemptions else 0)


def pairs_of(output: Any) -> Sequence[RecomputePair]:
    """Requests that were computed again with ``output`` of the scheduler."""
    return [one for one in getattr(output, PAIRS, ()) if isinstance(one, RecomputePair)]


def _running(request: Any) -> Running:
    tokens = min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens)
    decoded = max(0, tokens - request.num_prompt_tokens)
    return Running(request.request_id, tokens, decoded, int(request.num_preemptions))


def _without(names: set[str], outputs: dict[int, Any]) -> None:
    """Takes outputs of internal requests out of the scheduler's outputs to clients."""
    for one in outputs.values():
        if one.outputs:
            one.outputs = [output for output in one.outputs if output.request_id not in names]
        if one.finished_requests:
            one.finished_requests.difference_update(names)
