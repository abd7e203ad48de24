"""`SideStream`: a stream of Canary's own, for work that a forward needn't wait for."""

from collections.abc import Callable

import torch
from torch import Tensor

from canary_core.runtime.streams import LeanEvent, capturing, current_of, switch_to

LOOKED_AFTER, MOST_KEPT = 4, 16
"""Forwards whose tensors are kept before the device is asked for the first time whether it is done with them, and at
most."""


class SideStream:
    """A stream beside the one of the forwards. As a context, also within itself: what is issued there runs after all
    that was issued on the current stream before, or before the last `mark`. `join` is for whoever needs it done.

    Its priority is high: what runs there is short, and kernels of a forward would fill the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current = current_of(device)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._begun, self._done, self._ready = LeanEvent(), LeanEvent(), LeanEvent()
        self._postponed: list[tuple[torch.cuda.Stream, Callable[[], None]]] = []
        self._read: list[tuple[Tensor | None, ...]] = []
        self._kept: list[tuple[Tensor | None, ...]] = []
        self._main = self._stream
        self._to_side = self._to_main = switch_to(self._stream)
        self._depth = 0
        self.inside = False
        """Whether what is issued now is issued there."""
        self._marked = False
        self.open = False
        """Whether something was issued there that not everybody waits for yet."""

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self.inside = True
        main = self._current()
        if main is not self._main:
            self._main, self._to_main = main, switch_to(main)
        if not self._marked:
            self._begun.record(main)
            self._begun.wait(self._stream)
        self._marked = False
        self._to_side()

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._to_main()
            self.inside = False
            self.open = True

    def mark(self) -> None:
        """What is issued next on this stream waits for what the current one has to do by now, and for nothing after; so
        does what was postponed, which is issued now. Not captured."""
        self._begun.record(self._current())
        self._begun.wait(self._stream)
        self._marked = True
        if self._postponed:
            self.issue_postponed()

    def unmark(self) -> None:
        """Takes the last `mark` back, if nothing came of it."""
        self._marked = False

    def postpone(self, issue: Callable[[], None]) -> None:
        """``issue`` issues work that comes after what the current stream, the forwards', has to do by now: not yet, but
        at `issue_postponed`, or the next `mark` or `join`, whichever is first. Kernels of a sampler that were to start
        beside it would share processors with it and take twice as long, and nobody waits for it before the next
        forward."""
        self._postponed.append((self._current(), issue))
        self.open = True

    def issue_postponed(self) -> None:
        """What was postponed is issued now, to run after what the current stream has to do by now, or after the last
        `mark`, which goes on to hold. Not captured."""
        if not self._postponed:
            return
        marked = self._marked
        # Nobody marks while a graph is captured.
        if not marked and capturing(self._device):
            return
        stream, issue = self._postponed.pop()
        if stream is not self._current():
            self._ready.record(stream)
            self._ready.wait(self._stream)
        with self:
            issue()
        self._marked = marked

    def reads(self, *tensors: Tensor | None) -> None:
        """Work on this stream, issued by now, reads ``tensors``: their memory is handed out on no stream before that is
        done. They are kept until the device says so: to tell torch's allocator of each costs more, and once again when
        it is given up."""
        self._read.append(tensors)

    def join(self, for_good: bool = False, live: bool = False) -> None:
        """What the current stream does from now on comes after what was issued here. ``for_good``: so does all that is
        issued from now on, on any stream that matters. ``live``: no graph is captured, as the caller knows."""
        if not self.open or self.inside:
            # Within itself, what is issued comes after what was issued before anyway.
            return
        if self._postponed:
            self.issue_postponed()
        # Whoever captures has waited for the device before, and may not wait for what lies outside of the graph.
        if live or not capturing(self._device):
            if for_good and self._read:
                self._let_go()
            self._done.record(self._stream)
            self._done.wait(self._current())
        if for_good:
            self.open = False

    def _let_go(self) -> None:
        """Before `_done` is recorded again: what was kept when that was recorded last is read no more if it has passed.
        What was told of since is kept from now on."""
        if len(self._kept) >= LOOKED_AFTER and self._done.query():
            self._kept.clear()
        elif len(self._kept) >= MOST_KEPT:
            # The host is far ahead: the allocator has to know of them.
            for tensor in (t for tensors in self._kept for t in tensors if t is not None):
                tensor.record_stream(self._stream)
            self._kept.clear()
        self._kept += self._read
        self._read.clear()

    def follow(self) -> None:
        """What the current stream does from now on comes after what was issued here before the last `join`, whoever
        called that."""
        self._done.wait(self._current())
