"""Acts on findings, as set by ``CANARY_ON_VIOLATION``: corrupted KV is not served, and the server stays up.

A finding becomes a `Suspect`. The scheduler's thread acts before its next choice of work: it aborts requests that read
or hold the suspect's slot, with an error that tells the client to try again. With ``quarantine`` it also evicts nodes
of the prefix cache with the slot, as soon as they are not in use, so that later requests compute them again.

All ranks that schedule together (one tensor-parallel group) must make the same decisions, or they would run different
batches and wait for each other for ever. Each rank guards its own shard, and so has other findings. But all ranks make
the same turns of the scheduler's loop. So every `AGREE_EVERY` turns they learn whether any rank has a finding: one
number, asked for `AGREE_EVERY` turns earlier, so that nobody waits. Only after a finding do they exchange their
findings. Then all act on the same set, in the same order, at the same turn. Tables, slots and tree, the subjects of the
actions, are the same on all ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from canary_adapters import default_store
from canary_core import Canary, CanaryConfig, Event, Region, Violation, Writers, emit, hookimpl
from canary_sglang.actions.ranks import Ranks, Stages
from canary_sglang.actions.suspect import Suspect
from canary_sglang.compat import allocators, caches, disaggregated, schedulers
from canary_sglang.pools import compressor_state, mamba

AGREE_EVERY = 8
"""Turns of the scheduler's loop between two agreements of several ranks. They act at most twice as many turns after a
finding is told."""

RETRY_EVERY = 4
"""Turns between two tries of a slot still in use. A single rank acts on a new finding at once."""

SELDOM = 64
"""A slot that stays in use is handled at the 1st, 2nd, 4th, 8th, ... try, and at every try divisible by this number."""


class Quarantine:
    """A plugin of the core that acts on the findings of this process's Canaries. ``canaries``: returns the present
    ones. ``together``: whether all ranks do so; asked once, before the first collective, where there are several.
    ``withholds``: see `deciding_group`."""

    withholds = False

    def __init__(
        self,
        config: CanaryConfig,
        canaries: Callable[[], Iterable[Canary]],
        together: Callable[[], bool] = lambda: True,
    ) -> None:
        self._evicts = config.on_violation in ("quarantine", "protect")
        self._judged = config.ledger_private if self.withholds and config.ledger else ()
        self._rank = config.rank
        self._canaries = canaries
        self._together = together
        self._found: list[Suspect] = []
        self._open: dict[Suspect, int] = {}
        self._ours: set[Suspect] = set()
        self._failed: set[Suspect] = set()
        self._turn = 0
        self._off = False
        self._ranks: Ranks | None = None

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        """Remembers the finding for the next turn."""
        suspect = Suspect.of(violation)
        if suspect is not None and self._canary(suspect.region) is not None:
            self._found.append(suspect)

    def turn(self, scheduler: Any) -> None:
        """One turn of the scheduler's loop. Every rank must call it, even with its Canary off, since the ranks wait for
        each other. Raises only if the process group fails."""
        ranks = self.begin(scheduler)
        self._turn += 1
        if self._off:
            return
        if ranks.size == 1:
            if self._found or (self._open and self._turn % RETRY_EVERY == 0):
                self._act(scheduler, ranks.union(self._news()))
        elif self._turn % AGREE_EVERY == 0:
            said = ranks.end_round(self._news)
            if said is not None:
                self._act(scheduler, said)
            ranks.begin_round(bool(self._found or self._open), self._news)

    def begin(self, scheduler: Any) -> Ranks:
        """The ranks that decide together. The first call asks whether all are guarded alike, and reports an engine
        without possible actions; every rank must make it."""
        if self._ranks is None:
            self._ranks = self._meet(scheduler)
        return self._ranks

    def _act(self, scheduler: Any, said: Sequence[tuple[Suspect, bool]]) -> None:
        """Acts on suspects, each ``said`` to be new, or gone. All ranks must call it with the same arguments."""
        for suspect in (suspect for suspect, new in said if not new):
            self._open.pop(suspect, None)
            self._failed.discard(suspect)
        for suspect in (suspect for suspect, new in said if new):
            self._open.setdefault(suspect, 0)
        for suspect in sorted(self._open):
            tries = self._open[suspect]
            self._open[suspect] += 1
            if tries & (tries - 1) and tries % SELDOM:
                continue
            try:
                self._handle(scheduler, suspect, first=not tries)
            except Exception as error:
                # The next agreement tells the other ranks, before they do any more about this suspect.
                self._failed.add(suspect)
                self._tell("quarantine_failed", {**about(suspect), "reason": repr(error)}, "error")

    def _meet(self, scheduler: Any) -> Ranks:
        self._rank = self._rank or next((canary.config.rank for canary in self._canaries()), 0)
        group, reason = schedulers.deciding_group(scheduler, self.withholds)
        store = default_store() if schedulers.is_staged(scheduler) else None
        ranks = Ranks(group) if store is None or group is None else Stages(group, store)
        if reason is None and ranks.size > 1 and not self._together():
            reason = "not all ranks act on findings (CANARY_ON_VIOLATION is another one there, or they are unguarded)"
        elif reason is None and not ranks.alike(sorted(name for canary in self._canaries() for name in canary.regions)):
            reason = "not all ranks are guarded alike, so they can't decide alike"
        if reason is not None:
            self._off = True
            self._tell("quarantine_failed", {"reason": reason}, "warning")
        elif self._evicts and (reason := caches.giving_up_refusal(scheduler, self._judged)) is not None:
            self._evicts = False
            reason = f"{reason}; requests are aborted, nothing is evicted"
            self._tell("quarantine_failed", {"reason": reason}, "warning")
        return ranks

    def _news(self) -> list[tuple[Suspect, bool]]:
        """New findings of this rank, and, with False, open suspects that are gone or could not be handled. A finding
        comes some steps late, and is left out if already gone. Never raises: other ranks wait for the result."""
        found, self._found = self._found, []
        gone = set(self._failed)
        try:
            # Only the rank with the finding can say whether it is gone: the others have no such record.
            self._ours &= self._open.keys()
            gone |= {s for s in self._ours if self._is_gone(s)}
            fresh = {s for s in found if not self._is_gone(s)}
            # A recurrent state that was rewritten is still wrong: the forward computed it from the corrupted one.
            rewritten = {s for s in found if s.requests and s.plain_region == mamba.REGION} - fresh
            fresh |= {replace(s, slot=-1, spoiled=False, written=-1) for s in rewritten}
            self._ours |= fresh
        except Exception as error:
            self._tell("quarantine_failed", {"reason": repr(error)}, "error")
            fresh = set()
        return [(suspect, True) for suspect in sorted(fresh)] + [(suspect, False) for suspect in sorted(gone)]

    def _handle(self, scheduler: Any, suspect: Suspect, first: bool) -> None:
        place = self._place(scheduler, suspect)
        in_use = False
        for request in schedulers.running_requests(scheduler):
            holds = suspect.spoiled and place is not None and suspect.slot in place.of(request)
            in_use |= holds
            if holds or (first and Writers.told(request.rid) in suspect.requests):
                self._abort(scheduler, request, suspect)
        cached = place is not None and place.cached()
        if cached and place is not None and self._evicts:
            self._tell_evicted(suspect, place.evict())
            cached = place.cached()
        if not cached and not in_use:
            del self._open[suspect]

    def _tell_evicted(self, suspect: Suspect, tokens: int) -> None:
        if tokens:
            self._tell("quarantined", {**about(suspect), "evicted_tokens": tokens}, "warning")

    def _place(self, scheduler: Any, *suspects: Suspect) -> "Slots | States | None":
        """The place of the slots of ``suspects``, all of one region, in requests and in the prefix cache; None for
        slots of neither."""
        first = suspects[0]
        canary, slots = self._canary(first.region), frozenset(one.slot for one in suspects if one.slot >= 0)
        if canary is None or not slots:
            return None
        if first.plain_region == mamba.REGION:
            return States(scheduler, slots)
        if first.plain_region in (*allocators.ALLOCATED_REGIONS, compressor_state.C4):
            return Slots(scheduler, slots, canary.regions[first.region])
        return None

    def _abort(self, scheduler: Any, request: Any, suspect: Suspect) -> None:
        if schedulers.abort(scheduler, request, message(suspect)):
            self._tell("aborted", {"request": request.rid, **about(suspect)}, "error")

    def _is_gone(self, suspect: Suspect) -> bool:
        """Whether the slot was rewritten since. Reads the device, after a finding only."""
        canary = self._canary(suspect.region)
        if suspect.slot < 0 or suspect.written < 0 or canary is None:
            return False
        return not canary.slots.still_holds(suspect.region, suspect.slot, suspect.written)

    def _canary(self, region: str) -> Canary | None:
        return next((canary for canary in self._canaries() if region in canary.regions), None)

    def _tell(self, name: str, fields: dict[str, object], level: Any) -> None:
        canary = next(iter(self._canaries()), None)
        tell = emit if canary is None else canary.tell
        tell(Event(name, level, {"rank": self._rank, "turn": self._turn, **fields}))


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of a region in the engine's tables, under their own numbers or through a map."""

    scheduler: Any
    slots: frozenset[int]
    region: Region

    def of(self, request: Any) -> set[int]:
        """The region's slots that a running request has."""
        row, length = schedulers.table_row(self.scheduler, request)
        return set() if row is None else set(self.region.slots_of(row[:length]).tolist())

    def beside(self, request: Any) -> bool:
        """Whether a request computes from none of the slots, and keeps some in the prefix cache."""
        return False

    def cached(self) -> bool:
        """Whether the prefix cache has one of the slots."""
        slots = caches.cached_slots(self.scheduler.tree_cache)
        return slots is not None and bool(self._are(slots).any())

    def evict(self) -> int:
        """Evicts nodes with one of the slots and all below, unless in use. Returns how many tokens."""
        return caches.evict_nodes(self.scheduler.tree_cache, self._are)

    def _are(self, slots: Tensor) -> Tensor:
        """Whether each of ``slots``, numbered as in the engine's tables, is one of these."""
        return torch.isin(self.region.slots_of(slots), torch.tensor(sorted(self.slots), device=slots.device))


@dataclass(frozen=True, slots=True)
class States:
    """Slots of recurrent states."""

    scheduler: Any
    slots: frozenset[int]

    def of(self, request: Any) -> set[int]:
        """As `Slots.of`: a request computes from one state."""
        slot = schedulers.state_slot(self.scheduler, request)
        return set() if slot is None else {slot}

    def beside(self, request: Any) -> bool:
        """As `Slots.beside`: the request takes a checkpoint in one of the slots, or went on from a node with one, or
        below, before the change."""
        if not self.slots.isdisjoint(schedulers.checkpoint_slots(self.scheduler, request)):
            return True
        cache, node = self.scheduler.tree_cache, request.last_node
        return node is not None and caches.names_nodes(cache) and caches.StatesAbove(cache, self.slots)(node)

    def cached(self) -> bool:
        """As `Slots.cached`."""
        states = caches.cached_states(self.scheduler.tree_cache)
        return states is not None and not self.slots.isdisjoint(states.tolist())

    def evict(self) -> int:
        """As `Slots.evict`."""
        return caches.evict_states(self.scheduler.tree_cache, self.slots)


def message(suspect: Suspect) -> str:
    """The error of a request ended for ``suspect``."""
    return f"{disaggregated.CORRUPTED} ({suspect.kind}); try again"


def about(suspect: Suspect) -> dict[str, object]:
    """``suspect`` as fields of an event."""
    slot = {"slot": suspect.slot} if suspect.slot >= 0 else {}
    return {"kind": suspect.kind, "region": suspect.region, **slot}
