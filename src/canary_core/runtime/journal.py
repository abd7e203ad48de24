"""`Journal`: the last events of slots, as issued by the host, for later questions about a slot's owners."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

LENGTH = 1024
"""Calls kept."""

MOST_KEPT_BYTES = 1 << 14
"""Of a GPU's tensor of slots: keeping a larger one, or a view of one, alive would cost the engine memory."""


@dataclass(slots=True, eq=False)
class Entry:
    """One call of `SlotEvents`. ``step``: number of forwards begun. ``event``: name of the call. ``writer``: writer id
    of the caller, -1 if unknown. ``slots``: integer ``[n]``, pages of ``page_slots`` slots each; None where not kept,
    or for all of the region. ``other``: target of a copy. ``sure``: whether ``slots`` are a copy; else they are the
    engine's own tensor, possibly changed since."""

    step: int
    event: str
    region: str
    count: int
    writer: int
    slots: Tensor | None
    page_slots: int = 1
    other: Tensor | None = None
    sure: bool = True


class Journal:
    """A ring of `Entry`, of the last `LENGTH` calls. To note one costs no launch and no wait: on a GPU the engine's
    tensor itself is kept, if it is small. ``step`` is set by whoever begins forwards."""

    def __init__(self) -> None:
        self.step = 0
        self._entries: deque[Entry] = deque(maxlen=LENGTH)

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, event: str, region: str, slots: Mapping[str, Tensor], writer: object = -1, page: int = 1) -> None:
        """Notes a call. ``slots``: tensors of slots by argument, the main one first."""
        tensors = list(slots.values())
        kept = [_kept(tensor) for tensor in tensors]
        first = tensors[0] if tensors else None
        by = -1 if callable(writer) else int(writer)  # type: ignore[call-overload]
        entry = Entry(
            self.step,
            event,
            region,
            0 if first is None else first.shape[0],
            by,
            kept[0] if kept else None,
            page,
            kept[1] if len(kept) > 1 else None,
            sure=first is None or not first.is_cuda,
        )
        self._entries.append(entry)

    def keep(self, event: str, region: str, slots: Tensor, writer: object, page: int) -> None:
        """As `note`, of slots that nobody writes to any more."""
        by = -1 if callable(writer) else int(writer)  # type: ignore[call-overload]
        there = not slots.is_cuda
        kept = slots if there or slots.untyped_storage().nbytes() <= MOST_KEPT_BYTES else None
        self._entries.append(Entry(self.step, event, region, slots.shape[0], by, kept, page, None, there))

    def of(self, region: str) -> list[Entry]:
        """The calls about ``region``, oldest first."""
        return [entry for entry in self._entries if entry.region == region]


def _kept(tensor: Tensor) -> Tensor | None:
    if not tensor.is_cuda:
        return tensor.clone()
    return tensor if tensor.untyped_storage().nbytes() <= MOST_KEPT_BYTES else None
