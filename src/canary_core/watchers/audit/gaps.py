"""`gaps_of`: parts of an engine's KV memory that nobody describes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canary_core.boxes import Box, box_of, boxes_of
from canary_core.region import Region, Uncovered
from canary_core.watchers.audit.extents import clipped, distinct_bytes
from canary_core.watchers.audit.memory import EngineMemory, Storage


def gaps_of(
    regions: Sequence[Region], uncovered: Sequence[Uncovered], memory: EngineMemory
) -> tuple[int, list[Uncovered]]:
    """Bytes of ``memory``, the engine's own, that ``regions`` describe, each once, and what neither they nor
    ``uncovered`` do, under the engine's names. By addresses alone."""
    described: dict[int, list[Box]] = {}
    for region in regions:
        for source in region.sources:
            held = memory.holding(source, region.slots)
            if held is not None:
                described.setdefault(held, []).extend(boxes_of(source, region.slots))
    gaps = [_Gap.of(storage, described.get(i, []), uncovered) for i, storage in enumerate(memory.storages)]
    guarded = sum(gap.guarded_bytes for gap in gaps)
    _explain(gaps, [u.size_bytes for u in uncovered if u.tensor is None and u.size_bytes])
    return guarded, [item for gap in gaps for item in gap.items()]


@dataclass(slots=True)
class _Gap:
    """The part of one storage without a description."""

    storage: Storage
    boxes: list[Box]
    """Described memory, and memory left out by an `Uncovered` with an address."""
    guarded_bytes: int
    missing_bytes: int

    @classmethod
    def of(cls, storage: Storage, boxes: Sequence[Box], uncovered: Sequence[Uncovered]) -> "_Gap":
        """The gap of ``storage``, with ``boxes`` described by regions."""
        tensors = [u.tensor for u in uncovered if u.tensor is not None and u.tensor.numel()]
        there = [t for t in tensors if storage.start <= t.data_ptr() < storage.end and t.device == storage.data.device]
        known = [*boxes, *(box_of(t) for t in there)]
        missing = max(storage.data.numel() - distinct_bytes(known), 0)
        return cls(storage, known, distinct_bytes(boxes), missing)

    def items(self) -> Iterable[Uncovered]:
        """The missing memory, by the engine's tensors; of nested tensors the smallest first."""
        left = self.missing_bytes
        tensors = sorted(self.storage.tensors, key=lambda item: item[1].nbytes)
        sizes = {name: self._missing_of(box_of(tensor)) for name, tensor in tensors} if len(tensors) > 1 else {}
        for name, _ in self.storage.tensors:
            size = min(sizes.get(name, 0 if sizes else left), left)
            if size:
                left -= size
                yield Uncovered(name, size, "nobody describes them")
        if left:
            yield Uncovered(f"beside {self.storage.names}", left, "nobody describes them")

    def _missing_of(self, tensor: Box) -> int:
        there = distinct_bytes(clipped(self.boxes, tensor.start, tensor.end))
        return max(distinct_bytes([tensor]) - there, 0)


def _explain(gaps: Sequence[_Gap], sizes: Sequence[int]) -> None:
    """Subtracts memory left out without an address from the gaps: from a storage with exactly as many missing bytes,
    else from one after the other."""
    unplaced = 0
    for size in sizes:
        exact = next((gap for gap in gaps if gap.missing_bytes == size), None)
        if exact is None:
            unplaced += size
        else:
            exact.missing_bytes = 0
    for gap in gaps:
        taken = min(unplaced, gap.missing_bytes)
        gap.missing_bytes -= taken
        unplaced -= taken
