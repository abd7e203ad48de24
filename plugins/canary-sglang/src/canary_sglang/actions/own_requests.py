"""`OwnRequests`: the internal requests of SGLang's scheduler, in its queue, batches and results."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from canary_adapters import is_internal
from canary_core import Patches
from canary_sglang.compat import progress, schedulers


class OwnRequests:
    """The present internal requests of a scheduler. again: computes another request again, and never decodes. lesson:
    one of `Lessons`; decodes, and nothing of the lesson is streamed (`hide`).

    In a batch made but not run yet a request's slots are still to be written: the request ends in the next turn
    (`drop`).
    """

    def __init__(self) -> None:
        self.again: Any = None
        self.lesson: Any = None
        self._late: list[Any] = []
        self._patches = Patches()

    @property
    def all(self) -> Sequence[Any]:
        """Internal requests."""
        return [one for one in (self.again, self.lesson) if one is not None]

    def named(self, name: str) -> Any:
        """The internal request of a name, or None."""
        return next((one for one in self.all if one.rid == name), None)

    def computed(self, request: Any, batch: Any) -> int | None:
        """Number of tokens of ``request`` computed with ``batch``, the last batch made; None after the end."""
        if request.finished() or (request is self.lesson and request.is_retracted):
            return None
        if request is self.lesson:
            # Once it decodes, up to the end of its prefill.
            return progress.chunk_end(request) if request.extend_batch_idx else 0
        if batch is not None and any(one is request for one in batch.reqs):
            return progress.chunk_end(request)
        return progress.prefix_length(request)

    def hide(self, scheduler: Any) -> None:
        """Internal requests of ``scheduler`` are not streamed before the end, and at the end not anyway."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def stream(streamer: Any, reqs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
                kept = [one for one in reqs if not is_internal(one.rid)] if self.lesson is not None else reqs
                return original(streamer, kept, *args, **kwargs)

            return stream

        if not self._patches.done:
            self._patches.wrap(type(scheduler.output_streamer), "stream_output", make)

    def close(self) -> None:
        """After `drop`: restores the scheduler, unless a lesson still decodes."""
        if self.lesson is None:
            self._patches.undo()

    def leave_queue(self, scheduler: Any) -> None:
        """Takes internal requests out of the queue, also when retracted."""
        kept = [one for one in scheduler.waiting_queue if not is_internal(one.rid)]
        if len(kept) == len(scheduler.waiting_queue):
            return
        left = [one for one in scheduler.waiting_queue if is_internal(one.rid)]
        scheduler.waiting_queue = kept
        for one in left:
            schedulers.released(scheduler, one)
        # For want of room for them alone nobody else is kept waiting.
        scheduler.running_batch.batch_is_full = False

    def end(self, request: Any) -> None:
        """``request`` is to end with the next `drop`: between two chunks, a lesson between any two forwards. After the
        last chunk `again` ends anyway."""
        self._late.append(request)

    def drop(self, scheduler: Any) -> None:
        """Ends requests after a call of `end`."""
        late, self._late = self._late, []
        for request in late:
            if scheduler.chunked_req is request:
                schedulers.drop_chunked(scheduler, request)
            elif request is self.lesson:
                schedulers.drop_decoding(scheduler, request)
            if request is self.lesson:
                self.lesson = None

    def go_on(self, scheduler: Any, table: Tensor) -> None:
        """After a chunk internal requests go on from the chunk's slots, without the prefix cache. ``table``: of
        slots."""
        chunked = scheduler.chunked_req
        if any(one is chunked for one in self.all):
            progress.go_on_from_chunk(chunked, table[schedulers.row_number(chunked)])
        last, again = scheduler.last_batch, self.again
        if again is None or chunked is again or last is None or not last.forward_mode.is_extend():
            return
        if any(one is again for one in last.reqs):
            # With the overlap scheduler the result is not known yet: else it would decode once.
            progress.leave(last, again)
