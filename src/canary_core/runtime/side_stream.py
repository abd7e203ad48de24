"""`SideStream`: a stream of Canary's own, for work beside a forward."""

from collections.abc import Callable

import torch
from torch import Tensor

from canary_core.runtime.streams import LeanEvent, capturing, current_of, switch_to

LOOKED_AFTER, MOST_KEPT = 4, 16
"""Numbers of forwards whose tensors are kept: before the device is first asked whether it is done with them, and at
most."""


class SideStream:
    """A stream beside the forwards' stream. As a context, also nested: work issued within runs after all work issued
    before on the current stream, or before the last `mark`. `join` is for everybody who needs the work done.

    High priority: the work is short, and kernels of a forward would fill the device.
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
        """Whether the present work is issued there."""
        self._marked = False
        self.open = False
        """Whether work was issued there without a `join` for good since."""

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
        """The next work on this stream waits for the present work of the current one, and for nothing later; postponed
        work is issued now, and waits the same way. Not captured."""
        self._begun.record(self._current())
        self._begun.wait(self._stream)
        self._marked = True
        if self._postponed:
            self.issue_postponed()

    def unmark(self) -> None:
        """Takes an unused `mark` back."""
        self._marked = False

    def postpone(self, issue: Callable[[], None]) -> None:
        """Postpones ``issue``, which issues work to run after the present work of the current stream, the forwards':
        until `issue_postponed`, or the next `mark` or `join`, whichever is first. Kernels of a sampler starting beside
        the work would share processors and take twice as long, and nobody waits for the work before the next
        forward."""
        self._postponed.append((self._current(), issue))
        self.open = True

    def issue_postponed(self) -> None:
        """Issues postponed work now, to run after the present work of the current stream, or after the last `mark`,
        which stays valid. Not captured."""
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
        """Work on this stream, issued by now, reads ``tensors``: their memory is handed out on no stream before the end
        of the work. They are kept until the device is done: telling torch's allocator about each costs more, and once
        again on release."""
        self._read.append(tensors)

    def join(self, for_good: bool = False, live: bool = False) -> None:
        """Later work of the current stream waits for the work issued here. ``for_good``: so does all later work, on any
        stream that matters. ``live``: no graph is captured, as the caller knows."""
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
        """Before `_done` is recorded again: releases the tensors kept up to its last record if that has passed, and
        keeps the later ones from now on."""
        if len(self._kept) >= LOOKED_AFTER and self._done.query():
            self._kept.clear()
        elif len(self._kept) >= MOST_KEPT:
            # The host is far ahead: the allocator has to know of them.
            for tensor in (t for tensors in self._kept for t in tensors if t is not None):
                tensor.record_stream(self._stream)
            self._kept.clear()
        self._kept += self._read
        self._read.clear()

    def wait(self) -> None:
        """The host waits for the work issued here, but not for postponed work. From any thread."""
        self._stream.synchronize()

    def follow(self) -> None:
        """Later work of the current stream waits for the work issued here before the last `join`, called by anybody."""
        self._done.wait(self._current())
