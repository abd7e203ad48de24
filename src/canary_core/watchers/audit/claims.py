"""`Claims`: which slots an adapter says that a forward writes, and which may change beside it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.errors import AttachError
from canary_core.ops.torch import plan
from canary_core.records import Status
from canary_core.region import Region


class Claims:
    """What is said of one forward. Slots are int64 ``[n]`` of a region, each once, ascending, on the pool's device."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = {r.name: r for r in regions}
        self._written: dict[str, list[Tensor]] = {}
        self._allowed: dict[str, list[Tensor]] = {}
        self.outside: dict[str, Tensor] = {}
        """By region, write slots that are no slots of it."""

    @property
    def any_written(self) -> bool:
        """Whether a slot was named as written."""
        return any(t.numel() for tensors in self._written.values() for t in tensors)

    def view(self, view: BatchView) -> None:
        """All that the forward of ``view`` writes. Waits for the device. Raises `AttachError` for a region that is not
        audited."""
        for name, table in view.tables.items():
            region = self._region(name)
            slot, status = _writes(region, view, table)
            usable = status == Status.OK
            self._written.setdefault(name, []).extend((slot[usable], _checkpoints(region, view, table)))
            beyond = slot[status == Status.RANGE].unique()
            if len(beyond):
                self.outside[name] = beyond

    def slots(self, name: str, slots: Tensor | None) -> None:
        """``slots`` (None: all) of region ``name`` may change in another way. Numbers that are no slots are left out.
        Raises `AttachError` for a region that is not audited."""
        region = self._region(name)
        if slots is None:
            slots = torch.arange(region.slots, device=region.device)
        slots = slots.to(region.device).long().flatten()
        self._allowed.setdefault(name, []).append(slots[(slots >= 0) & (slots < region.slots)])

    def written(self, region: Region) -> Tensor:
        """Slots that the forward writes."""
        return _joined(self._written.get(region.name, ()), region)

    def allowed(self, region: Region) -> Tensor:
        """Slots that may change though the forward does not write them, the null slots with them."""
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
    """Slots into which the forward copies states as well: those that `record_checkpoints` records."""
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
