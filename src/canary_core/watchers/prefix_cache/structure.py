"""Rules for a prefix cache's slots, whatever they hold: a cached slot is not free, a passed window has none, and no two
nodes have the same one."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from canary_core.records import Kind, Phase
from canary_core.violation import Violation
from canary_core.watchers.prefix_cache.gathered import Gathered, SlotVerdict
from canary_core.watchers.prefix_cache.runs import Entries

RULES = {
    "slot_free": "slot {slot}, which holds its position {position}, is in the allocator's free list as well",
    "window_slot": "its window has passed, but position {position} still has slot {slot} there",
}
"""Sentence of a finding, by the broken rule."""


@dataclass(frozen=True, slots=True, eq=False)
class Breach:
    """Entries of the runs, bool ``[n]``, that break one of `RULES` in a region; ``slots``: int64 ``[n]``, to name."""

    region: str
    rule: str
    slots: Tensor
    mask: Tensor

    def violations(self, entries: Entries, step: int) -> Iterator[Violation]:
        """A finding for each entry."""
        for entry in self.mask.nonzero()[:, 0].tolist():
            slot, position = int(self.slots[entry]), int(entries.position[entry])
            yield Violation(
                kind=Kind.CACHE_STRUCTURE,
                region=self.region,
                phase=Phase.SWEEP,
                step=step,
                slot=slot,
                position=position,
                node=entries.node(entry),
                rule=self.rule,
                detail=RULES[self.rule].format(slot=slot, position=position),
            )


def breaches(gathered: Gathered, verdict: SlotVerdict, entries: Entries) -> list[Breach]:
    """Breaches in a region with a map from the engine's slots: passed windows that still have slots, and cached slots
    that are free."""
    region = gathered.state.region
    if region.slot_map is None:
        return []
    absent, slots = entries.absent(region.name), gathered.slot[: len(entries)]
    found = [Breach(region.name, "window_slot", slots, absent & verdict.held)]
    if gathered.free is not None:
        free = gathered.free[: len(entries)]
        found.append(Breach(region.name, "slot_free", slots, free & verdict.held & ~absent))
    return found


def shared_slots(numbers: Tensor, entries: Entries, most: int) -> list[tuple[int, int, int]]:
    """The first ``most`` pairs of different runs with a common slot, and the slot. ``numbers``: int64 ``[n]``, the
    runs' slots."""
    slot, order = numbers.sort(stable=True)
    run = entries.run[order]
    twice = ((slot[1:] == slot[:-1]) & (run[1:] != run[:-1])).nonzero()[:, 0]
    return [(int(run[i]), int(run[i + 1]), int(slot[i])) for i in twice[:most].tolist()]
