"""`WrongMemory`: tells an adapter that describes the wrong memory from an engine with a bug."""

from collections.abc import Sequence

from canary_core.events import Event
from canary_core.records import Kind, Phase
from canary_core.runtime.memory_proof import MemoryProof, Proof, Tally, decided
from canary_core.runtime.workspace import Workspace
from canary_core.violation import Violation

FIRST_TOLD = 8
"""Findings of a region reported although its memory is in doubt."""

MOST_HELD = 4096
"""Most findings kept until the decision; further ones are reported at once."""

MOST_READS = 1024
"""Reads of the tallies after which they count as settled without a forward to look at: all are in CUDA graphs."""

Doubted = tuple[str, str | None]
"""Suspected memory: a region's source, or, with None, the region's slots."""


class WrongMemory:
    """A filter between the device's findings and their receivers.

    While the first forwards of a region all fail (see `MemoryProof`), the first `FIRST_TOLD` findings of that sort are
    reported, and further ones kept by `hold`. After the decision they are reported after all, or, if the memory is
    wrong, replaced by one ``wrong_memory`` event and counted in ``withheld``. Findings dismissed by plugins never come
    here, and without findings there is no such event.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._proof: MemoryProof = workspace.proof
        self._states = workspace.states
        # Of a cache that every forward makes anew, sources are made only where somebody asks for them.
        self._names: dict[str, list[str | None]] = {
            region: [None, *(label.name for label in state.sources.judged)]
            for region, state in workspace.states.items()
        }
        self._raises = workspace.config.mode == "raise"
        self._proofs: dict[Doubted, Proof] = {}
        self._tallies: dict[Doubted, Sequence[int]] = {}
        self._seen: dict[Doubted, int] = {}
        self._told: dict[str, int] = {}
        self._wrong: set[Doubted] = set()
        # Wrong, but nothing was found there so far.
        self._untold: set[Doubted] = set()
        self._held: list[Violation] = []
        self._over: dict[str, bool] = {}
        self._reads = 0
        self.settled = False
        """Whether nothing more is to be read: the first forwards of all regions are over."""
        self.withheld: dict[Kind, int] = {}
        """How many findings were not told, by kind."""

    def read(self, tallies: Sequence[Sequence[int]]) -> None:
        """Takes the tallies of a read, before its findings."""
        self._reads += 1
        self.settled = all(self._over.get(region, False) for region in self._proof.rows) or self._reads >= MOST_READS
        for region, rows in self._proof.rows.items():
            own = tallies[rows]
            # The copy that is read now was begun at the read before, or later.
            over, self._over[region] = self._over.get(region, False), self._proof.over(region)
            for name, row, proof in zip(self._names[region], own, decided(own, over), strict=True):
                doubt = (region, name)
                self._tallies[doubt] = row
                if self._proofs.get(doubt, Proof.NONE) < Proof.RIGHT:
                    self._proofs[doubt] = proof
                    if proof is Proof.WRONG:
                        self._untold.add(doubt)
            if all(self._proofs[region, name] is Proof.RIGHT for name in self._names[region]):
                self._proof.end(region)

    def takes(self, violation: Violation) -> bool:
        """Whether ``violation`` is not to be reported now: kept, or only counted. Never in raise mode."""
        doubt = _doubt(violation)
        proof = Proof.NONE if doubt is None else self._proofs.get(doubt, Proof.NONE)
        if doubt is None or proof not in (Proof.SUSPECT, Proof.WRONG):
            return False
        self._seen[doubt] = self._seen.get(doubt, 0) + 1
        told = self._told.get(violation.region, 0)
        if self._raises or told < FIRST_TOLD:
            self._told[violation.region] = told + 1
            return False
        if doubt in self._wrong:
            self._withhold(violation)
        elif len(self._held) < MOST_HELD:
            self._held.append(violation)
        else:
            return False
        return True

    def decide(self, at_last: bool = False) -> tuple[list[Event], list[Violation]]:
        """After the findings of a read: the events to tell, and the findings that waited and are told now. ``at_last``:
        none waits any longer."""
        if not self._held and not self._untold:
            return [], []
        doubted = {region for region, source in self._untold if self._seen.get((region, source))}
        new = {doubt for doubt in self._untold if doubt[0] in doubted}
        self._untold -= new
        self._wrong |= new
        held, self._held = self._held, []
        tell = []
        for violation in held:
            doubt = _doubt(violation)
            if doubt in self._wrong:
                self._withhold(violation)
            elif at_last or doubt is None or self._proofs.get(doubt) is not Proof.SUSPECT:
                tell.append(violation)
            else:
                self._held.append(violation)
        return [self._event(region, new) for region in sorted(doubted)], tell

    def _withhold(self, violation: Violation) -> None:
        self.withheld[violation.kind] = self.withheld.get(violation.kind, 0) + 1

    def _event(self, region: str, new: set[Doubted]) -> Event:
        sources = [s.name for s in self._states[region].sources.judged if (region, s.name) in new]
        every = len(self._states[region].sources.judged)
        fields: dict[str, object] = {"region": region, "told": self._told.get(region, 0)}
        reasons = []
        if (region, None) in new:
            tally = self._tallies[region, None]
            fields |= {"entries": tally[Tally.COUNT], "no_slots": tally[Tally.BAD]}
            reasons.append(
                f"{tally[Tally.BAD]} of {tally[Tally.COUNT]} table entries and write slots of its first forwards are "
                f"no slots of it; check the table's page size, its slot numbers (pages or tokens), and Region.slots"
            )
        if sources:
            tallies = [self._tallies[region, source] for source in sources]
            count, bad = (sum(tally[column] for tally in tallies) for column in (Tally.COUNT, Tally.BAD))
            which = "any source" if len(sources) == every else f"{len(sources)} of {every} sources"
            fields |= {"sources": sources, "first_writes": count, "unchanged": bad}
            reasons.append(
                f"{bad} of {count} first writes left the bytes of {which} as they were; check that its tensors are the "
                "engine's own and no copies, that layers and halves are the right ones, that the batch's write slots "
                "are where the engine stores, and that the view is made before the forward and recorded after it"
            )
        reason = f"the adapter of region {region!r} probably describes the wrong memory: {'; '.join(reasons)}"
        also = "From now on such findings are counted, not told. If the adapter is right, the engine never stores there"
        return Event("wrong_memory", "error", {"reason": f"{reason}. {also}.", **fields})


def _doubt(violation: Violation) -> Doubted | None:
    """The wrong memory that would explain ``violation``, None for none."""
    if violation.kind is Kind.LOST_WRITE:
        return violation.region, violation.source
    if violation.kind in (Kind.SLOT_RANGE, Kind.NULL_SLOT) and violation.phase in (
        Phase.PRE_FORWARD,
        Phase.POST_FORWARD,
    ):
        return violation.region, None
    return None
