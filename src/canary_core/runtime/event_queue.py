"""`EventQueue`: events issued by the host between two forwards, and the moment they take effect."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from canary_core.runtime.streams import capturing, current


@dataclass(slots=True, eq=False)
class QueuedEvent:
    """An event issued by the host between two forwards.

    ``apply`` performs the event, with ``tensors``. They are valid after the events ``ready``; without any, one is
    recorded on the current stream when the event is queued. ``arrival``: changes the content of slots, not only their
    owners. ``frees``: slots of the event may be handed out anew. Consecutive events of one ``key`` are applied
    together, with all their tensors.
    """

    apply: Callable[[list[Tensor]], None]
    tensors: list[Tensor]
    ready: list[torch.cuda.Event] = field(default_factory=list)
    arrival: bool = False
    key: tuple[object, ...] | None = None
    frees: bool = True


class EventQueue:
    """Events in the order issued by the host, from any stream.

    They take effect on the stream of the forwards on ``device``: after all forwards issued before them, and before the
    next one. Never during a graph capture, since a replay would repeat them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = device.type == "cuda"
        self._waiting: list[QueuedEvent] = []
        self._deferred: list[Callable[[], None]] = []
        self._freed = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._deferred)

    @property
    def frees_nothing(self) -> bool:
        """Whether no event since `joined` lets slots be written anew."""
        return not self._freed and not self._deferred

    def joined(self) -> None:
        """Later forwards are issued after all records so far."""
        self._freed = False

    def defer(self, tell: Callable[[], None]) -> None:
        """For events cheaper to report as one: ``tell`` puts them. Called once, before any other event is queued or
        takes effect, so the order stays the same."""
        if tell not in self._deferred:
            self._deferred.append(tell)

    def put(self, *events: QueuedEvent) -> None:
        """``events`` wait until `settle`. Several have parts of one tensor: later ones are ready with the first."""
        if self._deferred:
            self._tell_deferred()
        first, waiting = events[0], self._waiting
        if self._gpu and not first.ready and first.tensors:
            # They may be made on another stream than the forwards run on.
            ready = torch.cuda.Event()
            ready.record(current(self._device))
            first.ready.append(ready)
        for event in events:
            self._freed = self._freed or event.frees
            if event.key is not None and waiting and waiting[-1].key == event.key:
                last = waiting[-1]
                last.tensors += event.tensors
                # Events that are told together often wait for the same.
                last.ready += [ready for ready in event.ready if ready not in last.ready]
            else:
                waiting.append(event)

    def put_arrival(self, apply: Callable[[], None], *tensors: Tensor) -> None:
        """Changes the content of slots, by ``apply``, which uses ``tensors``: now, or, where events of the allocator
        still wait for the next forward, after those; applied later to the same slot, such an event would undo the
        change."""
        if self._deferred:
            self._tell_deferred()
        self._freed = True
        if self._waiting and not capturing(self._device):
            self.put(QueuedEvent(lambda _: apply(), list(tensors), arrival=True))
        else:
            apply()

    def settle(self) -> None:
        """Applies waiting events on the current stream: after all forwards issued so far, before the next."""
        if not (self._waiting or self._deferred) or capturing(self._device):
            return
        self._tell_deferred()
        events, self._waiting = self._waiting, []
        for event in events:
            for ready in event.ready:
                ready.wait()
            for tensor in event.tensors if event.ready else ():
                if tensor.is_cuda:
                    # Made on another stream, its memory must not be handed out there before this one has read it.
                    tensor.record_stream(current(tensor.device))
            event.apply(event.tensors)

    def settle_arrivals(self) -> None:
        """Before reading the content of slots: as `settle`, if any waiting event changes it."""
        if any(event.arrival for event in self._waiting):
            self.settle()

    def _tell_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for tell in deferred:
            tell()
