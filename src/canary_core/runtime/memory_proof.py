"""`MemoryProof`: whether an adapter describes the engine's memory, judged by the first forwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.state import RegionState
from canary_core.records import STEP_WRITTEN, Status

if TYPE_CHECKING:
    from canary_core.ops.torch.plan import Places

LOOKED_FORWARDS = 16
"""Most forwards of a region looked at, from the first on."""

AGREEING_FORWARDS = 4
"""Forwards that must all agree before the memory counts as wrong."""

TOKENS, ROWS, PLACES = 256, 64, 8
"""New tokens, requests, and positions of each request, looked at in one forward."""


class Tally(IntEnum):
    """Column of the tallies, int64 ``[1 + sources, 4]`` a region: the first row is about table entries and slots to
    write, each of the others about the first writes of one source."""

    FORWARDS = 0
    """Number of forwards with something to look at."""
    FAILED = 1
    """Of these, forwards with nearly nothing right: at least half of the entries were no slots, or at least nine of ten
    writes left the bytes unchanged."""
    COUNT = 2
    BAD = 3


class Proof(IntEnum):
    """Verdict of a row of the tallies."""

    NONE = 0
    """Nothing yet."""
    SUSPECT = 1
    """All forwards so far failed, too few to be sure."""
    RIGHT = 2
    """The engine was seen to use the described memory, or the first forwards are over."""
    WRONG = 3


def proof_of(forwards: int, failed: int) -> Proof:
    """Verdict of so many forwards."""
    if not forwards:
        return Proof.NONE
    if failed < forwards:
        return Proof.RIGHT
    return Proof.WRONG if forwards >= AGREEING_FORWARDS else Proof.SUSPECT


@dataclass(frozen=True, slots=True, eq=False)
class FirstWrites:
    """Slots written by a forward (int64 ``[n]``), whether each was never written before, and the earlier fingerprints
    of their bytes, int64 ``[n, judged]``: those of `SourceTable.firsts`."""

    slots: Tensor
    first: Tensor
    before: Tensor


class MemoryProof:
    """Looks at a sample of the first forwards of each region, `LOOKED_FORWARDS` at most, in a hundred small operations
    of torch, on the stream of the checks. It never waits for the device, and looks at nothing while a graph is
    captured.

    tallies: int64 ``[n, 4]``, see `Tally`; the host reads them with the counters.
    """

    def __init__(self, states: Mapping[str, RegionState], device: torch.device) -> None:
        lengths = [1 + len(state.sources.judged) for state in states.values()]
        self.tallies = torch.zeros(sum(lengths), len(Tally), dtype=torch.int64, device=device)
        self.rows: dict[str, slice] = {}
        """The rows of each region."""
        end = 0
        for name, length in zip(states, lengths, strict=True):
            self.rows[name] = slice(end, end + length)
            end += length
        self._left = dict.fromkeys(states, LOOKED_FORWARDS)
        self.looks = bool(states)
        """Whether any region is looked at still: where none is, nobody needs to ask."""

    def over(self, region: str) -> bool:
        """Whether the region is not looked at any more."""
        return not self._left.get(region)

    def end(self, region: str) -> None:
        """The region is decided: its next forwards are not looked at."""
        self._left[region] = 0
        self.looks = any(self._left.values())

    def look(self, state: RegionState, view: BatchView, table: SlotTable) -> None:
        """After `check` of a forward: looks whether the entries to read, and the slots to write, are slots."""
        name = state.region.name
        if not view.tokens or self.over(name):
            return
        self._left[name] -= 1
        self.looks = any(self._left.values())
        planned = state.scratch.plan[: min(view.tokens, TOKENS), 0]
        writes = planned > 0
        places, read = _sample(state, view, table)
        from canary_core.ops.torch import plan

        _, status = plan.lookup(state.region, table, places)
        bad = (read & (status != Status.OK)).sum() + (writes & ((planned >> 32) - 1 != Status.OK)).sum()
        self._add(self.tallies[self.rows[name]][:1], (read.sum() + writes.sum())[None], bad[None], (1, 2))

    def writes(self, state: RegionState, view: BatchView) -> FirstWrites | None:
        """Before the forward's bytes are fingerprinted; None where nobody looks."""
        if self.over(state.region.name):
            return None
        planned = state.scratch.plan[: min(view.tokens, TOKENS)]
        usable = planned[:, 0] >> 32 == Status.OK + 1
        slots = torch.where(usable, planned[:, 1], 0)
        firsts = state.sources.firsts
        return FirstWrites(
            slots, usable & (state.records[slots, STEP_WRITTEN] == 0), state.fingerprints[slots][:, firsts]
        )

    def compare(self, state: RegionState, writes: FirstWrites) -> None:
        """After the forward: looks whether it changed the bytes of ``writes``, where known."""
        judged = writes.first[:, None] & (writes.before != 0) & state.sources.sure
        same = judged & (state.fingerprints[writes.slots][:, state.sources.firsts] == writes.before)
        self._add(self.tallies[self.rows[state.region.name]][1:], judged.sum(0), same.sum(0), (9, 10))

    def _add(self, tallies: Tensor, count: Tensor, bad: Tensor, share: tuple[int, int]) -> None:
        """Adds to the tallies. ``share``: smallest share of bad ones in a failed forward."""
        failed = (count > 0) & (bad * share[1] >= count * share[0])
        tallies += torch.stack(((count > 0).long(), failed.long(), count, bad), dim=1)


def _sample(state: RegionState, view: BatchView, table: SlotTable) -> "tuple[Places, Tensor]":
    """`PLACES` positions of each of the first `ROWS` requests, and whether the forward reads each."""
    from canary_core.ops.torch import plan

    rows = plan.rows(state.region, view, table)
    count = min(view.rows, ROWS)
    first, end = rows.read_first[:count, None], rows.prefix[:count, None]
    step = torch.arange(PLACES, device=view.device)
    position = first + (end - first).clamp(min=0) * step // PLACES
    row = torch.arange(count, device=view.device)[:, None].expand_as(position)
    return plan.Places(row.flatten(), position.flatten()), (end > first).expand_as(position).flatten()


def decided(tallies: Sequence[Sequence[int]], over: bool) -> list[Proof]:
    """Verdict of each row of one region's ``tallies``. ``over``: no more forwards are looked at."""
    found = [proof_of(row[Tally.FORWARDS], row[Tally.FAILED]) for row in tallies]
    return [Proof.RIGHT if over and proof is Proof.SUSPECT else proof for proof in found]
