"""`Claims`: the slots a forward writes by its adapter's claim, and the slots that may change beside them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.errors import AttachError
from canary_core.ops.torch import plan
from canary_core.records import Status
from canary_core.region import Region


class Claims:
    """Claims about one forward. Slots are int64 ``[n]`` of a region, each once, ascending, on the pool's device."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = {r.name: r for r in regions}
        self._written: dict[str, list[Tensor]] = {}
        self._allowed: dict[str, list[Tensor]] = {}
        self.outside: dict[str, Tensor] = {}
        """By region, write slots beyond the region."""

    @property
    def any_written(self) -> bool:
        """Whether a slot was named as written."""
        return any(t.numel() for tensors in self._written.values() for t in tensors)

    def view(self, view: BatchView) -> None:
        """Claims all writes of the forward of ``view``. Waits for the device. Raises `AttachError` for a region outside
        of the audit."""
        for name, table in view.tables.items():
            region = self._region(name)
            slot, status = _writes(region, view, table)
            usable = status == Status.OK
            self._written.setdefault(name, []).extend((slot[usable], _checkpoints(region, view, table)))
            beyond = slot[status == Status.RANGE].unique()
            if len(beyond):
                self.outside[name] = beyond

    def writes(self, view: BatchView) -> None:
        """Allows the slots that the forward of ``view`` writes to change. Waits for the device. Raises as `view`."""
        for name, table in view.tables.items():
            slot, status = _writes(self._region(name), view, table)
            self.slots(name, slot[status == Status.OK])

    def slots(self, name: str, slots: Tensor | None) -> None:
        """Allows ``slots`` (None: all) of region ``name`` to change in another way. Numbers beyond the region are left
        out. Raises `AttachError` for a region outside of the audit."""
        region = self._region(name)
        if slots is None:
            slots = torch.arange(region.slots, device=region.device)
        slots = slots.to(region.device).long().flatten()
        self._allowed.setdefault(name, []).append(slots[(slots >= 0) & (slots < region.slots)])

    def written(self, region: Region) -> Tensor:
        """Slots written by the forward."""
        return _joined(self._written.get(region.name, ()), region)

    def allowed(self, region: Region) -> Tensor:
        """Slots that may change without a write by the forward, null slots included."""
        null = torch.arange(region.null_range.start, region.null_range.stop, device=region.device)
        every = [*self._allowed.get(region.name, ()), null]
        return _joined(every, region)

    def _region(self, name: str) -> Region:
        if name not in self._regions:
            raise AttachError(f"the audit knows no region {name!r}; there are {sorted(self._regions)}")
        return self._regions[name]


def _writes(region: Region, view: BatchView, table: SlotTable) -> tuple[Tensor, Tensor]:
    ranges = plan.rows(region, view, table)
    places = plan.stored(region, ranges)
    return plan.write_slots(region, table, places, ranges.token(places))


def _checkpoints(region: Region, view: BatchView, table: SlotTable) -> Tensor:
    """Slots into which the forward also copies states, as recorded by `record_checkpoints`."""
    made = table.checkpoints
    if made is None:
        return torch.empty(0, dtype=torch.int64, device=region.device)
    prefix, new = view.prefix_lens.long().clamp(min=0), view.new_lens.long().clamp(min=0)
    there = region.status_of(made.slots) == Status.OK
    there &= (made.positions >= prefix) & (made.positions < prefix + new)
    return made.slots[there]


def _joined(tensors: Iterable[Tensor], region: Region) -> Tensor:
    empty = torch.empty(0, dtype=torch.int64, device=region.device)
    every: Tensor = torch.cat([empty, *(t.to(region.device) for t in tensors)]).unique()
    return every
