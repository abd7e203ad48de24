"""`Gathered`: records of cached slots in one region at the moment of a sweep, and the verdict."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.ops.mapping import NOTHING, Seen, verdict
from canary_core.ops.state import RegionState
from canary_core.records import FIRST_CONTENT, ROW_WORDS, Kind, Phase, Row, State, Status
from canary_core.watchers.prefix_cache.runs import UNKNOWN, Entries, FreeList


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """Records of one region's slots, ``[n]`` each: every number's slot, its record (int32 ``[n, 8]``), whether the
    number leads nowhere and whether the slot is free; the last two are None where impossible or unknown. On the device
    until `on_host`."""

    state: RegionState
    slot: Tensor
    records: Tensor
    lost: Tensor | None
    free: Tensor | None

    @classmethod
    def of(cls, state: RegionState, numbers: Tensor, free: Sequence[FreeList]) -> "Gathered":
        """Reads the records of ``numbers``, numbered as in the engine's tables, on the current stream."""
        region = state.region
        slot, lost = region.locate(numbers)
        records = state.records[slot.clamp(0, region.slots - 1)]
        listed = next((item.contain(slot) for item in free if item.region == region.name), None)
        return cls(state, slot, records, lost, listed)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors but None, in order."""
        return [t for t in (self.slot, self.records, self.lost, self.free) if t is not None]

    def on_host(self, copies: Iterator[Tensor]) -> "Gathered":
        """The same with copies of `tensors`, taken from ``copies``."""
        slot, records = next(copies), next(copies)
        lost = None if self.lost is None else next(copies)
        return Gathered(self.state, slot, records, lost, None if self.free is None else next(copies))

    def seen(self) -> Seen:
        """The records by field."""
        return Seen.of(self.records, self.slot, self.state.region.status_of(self.slot, self.lost))


@dataclass(frozen=True, slots=True, eq=False)
class SlotVerdict:
    """Findings about the slots of one region, on the host.

    entries: int64 ``[k]``, entries with a finding. kinds: int64 ``[k]``. should_be: int64 ``[k]``, for `Kind.PREFIX`
    the right hash. seen: the records of all numbers read. judged: number of compared slots. unknown: of these, number
    with an unknown record.
    """

    entries: Tensor
    kinds: Tensor
    should_be: Tensor
    seen: Seen
    judged: int
    unknown: int

    @classmethod
    def of(cls, gathered: Gathered, entries: Entries) -> "SlotVerdict":
        """At most one finding an entry, by the rule of the check before a forward."""
        region, count = gathered.state.region, len(entries)
        group = region.tokens_per_slot
        chosen = ~entries.absent(region.name)
        if group > 1:
            chosen &= (entries.position + 1) % group == 0
        position = entries.position // group
        every = gathered.seen()
        seen = every[:count]
        # The entry with the token, or the group of tokens, before: of this run, or the slot before it.
        before = torch.where(entries.inside >= group, torch.arange(count, device="cpu") - group, -1)
        before = torch.where(entries.inside == group - 1, entries.before, before)
        prior = every[before.clamp(min=0)]
        known = (before >= 0) & (position > 0) & prior.holds(position - 1) & (prior.hash != 0)
        linked, should_be = seen.continues(position, prior.hash, known)
        # A cache knows the placeholders of content; what stands for these was never a token.
        token = torch.where(seen.token >= FIRST_CONTENT, UNKNOWN, entries.token)
        kinds = verdict(seen, position, token, linked)
        bad = (chosen & (kinds != NOTHING)).nonzero()[:, 0]
        unknown = int((chosen & seen.usable & (seen.state == State.UNKNOWN)).sum())
        return cls(bad, kinds[bad], should_be[bad], seen, int(chosen.sum()), unknown)

    def rows(self, state: RegionState, entries: Entries, step: int, most: int) -> list[list[int]]:
        """The first ``most`` findings, as rows of the violation ring (see `Row`)."""
        bad, kinds = self.entries[:most], self.kinds[:most]
        seen = self.seen[bad]
        said: dict[Row, Tensor | int] = {
            **seen.fields(),
            Row.KIND: kinds,
            Row.REGION: state.index,
            Row.SLOT: seen.slot,
            Row.POSITION: entries.position[bad] // state.region.tokens_per_slot,
            Row.TOKEN: entries.token[bad],
            Row.FOUND_VALUE: torch.where(kinds == Kind.PREFIX, self.should_be[:most], -1),
            Row.STEP: step * 8 + Phase.SWEEP,
        }
        rows = torch.full((len(bad), ROW_WORDS), -1, dtype=torch.int64, device="cpu")
        for word, value in said.items():
            rows[:, word] = value
        found: list[list[int]] = rows.tolist()
        return found

    @property
    def held(self) -> Tensor:
        """Whether each entry has a slot in the region, bool ``[n]``."""
        return self.seen.status == Status.OK
