"""`Changes`: what the host issued between two forwards, and when it takes effect."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from canary_core.runtime.streams import capturing, current


@dataclass(slots=True, eq=False)
class Change:
    """Something that the host issued between two forwards. ``tensors`` are what it uses, made by ``ready``, which if
    empty is what the current stream has to do when it is queued;
    ``arrival``: it changes what slots hold, not only whose they are. Changes of the same ``key``, one after the other,
    take effect together."""

    apply: Callable[[list[Tensor]], None]
    tensors: list[Tensor]
    ready: list[torch.cuda.Event] = field(default_factory=list)
    arrival: bool = False
    key: tuple[object, ...] | None = None


class Changes:
    """Changes in the order in which the host issues them, from whatever stream; they take effect on the stream of the
    forwards on ``device``, after all forwards issued before them and before the next. Never while a graph is captured:
    it would replay them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[Change] = []
        self._going_on: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._going_on)

    def go_on(self, tell: Callable[[], None]) -> None:
        """Something goes on of which ``tell`` queues the changes: once, before any other is queued or takes effect."""
        if tell not in self._going_on:
            self._going_on.append(tell)

    def queue(self, change: Change) -> None:
        """``change`` waits until it is settled."""
        self._end()
        if not change.ready and any(t.is_cuda for t in change.tensors):
            # They may be made on another stream than the forwards run on.
            ready = torch.cuda.Event()
            ready.record(current(self._device))
            change.ready.append(ready)
        last = self._waiting[-1] if self._waiting else None
        if last is not None and change.key is not None and last.key == change.key:
            last.tensors += change.tensors
            last.ready += change.ready
        else:
            self._waiting.append(change)

    def arrive(self, apply: Callable[[], None], *tensors: Tensor) -> None:
        """Slots get other content: now, or after the allocator's events that the host issued before and that wait for
        the next forward; applied to a slot later, those would take it back."""
        self._end()
        if self._waiting and not capturing(self._device):
            self.queue(Change(lambda _: apply(), list(tensors), arrival=True))
        else:
            apply()

    def settle(self) -> None:
        """Applies what waits on the current stream: after all forwards issued so far, before the next."""
        if not len(self) or capturing(self._device):
            return
        self._end()
        changes, self._waiting = self._waiting, []
        for change in changes:
            for ready in change.ready:
                ready.wait()
            for tensor in change.tensors if change.ready else ():
                if tensor.is_cuda:
                    # Made on another stream, its memory must not be handed out there before this one has read it.
                    tensor.record_stream(current(tensor.device))
            change.apply(change.tensors)

    def settle_arrivals(self) -> None:
        """Where what slots hold is about to be read: as `settle`, if anything that waits changes it."""
        if any(change.arrival for change in self._waiting):
            self.settle()

    def _end(self) -> None:
        going_on, self._going_on = self._going_on, []
        for tell in going_on:
            tell()
