"""`Damage`: where the bytes of an incident differ, and how these places lie in requests and pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from canary_core.desk.incidents.evidence import Copy, Evidence
from canary_core.desk.incidents.happened import last_of_all
from canary_core.records import POSITION, STATES, WRITER, State
from canary_core.violation import Violation, counted

EVERY = 3
"""Damaged tokens at equal distances that are a pattern."""


@dataclass(slots=True, eq=False)
class Damage:
    """Where bytes differ. ``cells``: slots and sources that do. ``copies``: those whose bytes belong elsewhere.
    ``positions``: of damaged slots. ``every``: how far apart they are, where that is always the same and those between
    are intact. ``edge``: in each page the first slot, or the last one, is damaged.

    Texts are parts of sentences, empty where it is not so.
    """

    slots: list[int]
    sources: list[str]
    layers: set[int]
    halves: set[str]
    all_layers: int
    cells: int
    copies: list[Copy]
    positions: dict[int, int]
    where: str = ""
    layout: tuple[str, ...] = ()
    every: int | None = None
    edge: bool = False
    edges: tuple[str, ...] = ()
    torn: str = ""
    whole_page: str = ""
    shared: str = ""
    arrived: str = ""

    @classmethod
    def of(cls, found: Sequence[Violation], evidence: Evidence | None) -> "Damage":
        """All that differs now, and what the BYTES findings ``found`` say differed."""
        places = {(v.slot, v.source) for v in found if v.slot is not None and v.source is not None}
        if evidence is not None:
            rows, columns = evidence.differs.nonzero(as_tuple=True)
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
                places.add((int(evidence.slots[row]), evidence.sources[column].name))
        by_name = {} if evidence is None else {s.name: s for s in evidence.sources}
        sources = sorted({source for _, source in places})
        named = [by_name[s] for s in sources if s in by_name]
        damage = cls(
            slots=sorted({slot for slot, _ in places}),
            sources=sources,
            layers={s.layer for s in named} or {v.layer for v in found if v.layer is not None},
            halves={s.half for s in named} or {v.half for v in found if v.half is not None},
            all_layers=len({s.layer for s in by_name.values()}),
            cells=len(places),
            copies=[] if evidence is None else [c for c in evidence.copies if (c.slot, c.source) in places],
            positions={},
        )
        damage.where = _where(damage)
        damage.layout = (f"{len(damage.slots)} slots, {len(sources)} of {len(by_name) or '?'} sources are damaged",)
        if evidence is not None:
            damage._place(evidence)
        return damage

    def _place(self, evidence: Evidence) -> None:
        """How the damaged slots lie in their requests and pages."""
        records = {slot: evidence.record(slot) for slot in self.slots}
        self.positions = {s: r[POSITION] // STATES for s, r in records.items() if r is not None}
        writers = {r[WRITER] for r in records.values() if r is not None}
        if len(writers) == 1:
            self._of_one_request(evidence, next(iter(writers)))
        self._of_pages(evidence)
        self._of_history(evidence)

    def _of_one_request(self, evidence: Evidence, writer: int) -> None:
        own = {
            int(slot): int(record[POSITION]) // STATES
            for slot, record in zip(evidence.slots.tolist(), evidence.records, strict=True)
            if int(record[WRITER]) == writer and int(record[POSITION]) & 3 == State.WRITTEN
        }
        damaged = sorted({own[slot] for slot in self.slots if slot in own})
        between = set(own.values()) - set(damaged)
        gaps = {b - a for a, b in pairwise(damaged)}
        if len(damaged) < EVERY or len(gaps) != 1:
            return
        (gap,) = gaps
        if gap > 1 and all(p in between for a in damaged[:-1] for p in range(a + 1, a + gap)):
            self.every = gap

    def _of_pages(self, evidence: Evidence) -> None:
        size = evidence.page_size
        if size < 2:
            return
        taken = set(evidence.slots.tolist())
        written = {
            int(s)
            for s, r in zip(evidence.slots.tolist(), evidence.records, strict=True)
            if int(r[POSITION]) & 3 == State.WRITTEN
        }
        pages: dict[int, list[int]] = {}
        for slot in self.slots:
            pages.setdefault(slot // size, []).append(slot % size)
        for which, place in (("first", 0), ("last", size - 1)):
            if len(pages) > 1 and all(places == [place] for places in pages.values()):
                self.edge, self.edges = (
                    True,
                    (f"the {which} slot of each of {len(pages)} pages of {size} slots is damaged",),
                )
        if len(pages) != 1:
            return
        ((page, places),) = pages.items()
        mates = [i for i in range(size) if page * size + i in written]
        if not all(page * size + i in taken for i in range(size)) or len(mates) < 2:
            return
        if places == mates:
            self.whole_page = (
                f"all {len(mates)} written slots of page {page} differ, and no other slot that was looked at"
            )
        elif places == mates[: len(places)] or places == mates[-len(places) :]:
            part = "first" if places == mates[: len(places)] else "last"
            self.torn = f"only the {part} {len(places)} of {len(mates)} written slots of page {page} differ"

    def _of_history(self, evidence: Evidence) -> None:
        """Whether all damaged slots, and only those, came in one way."""
        for event, noted, name in (("import_records", "arrive", "arrived"), ("share", "share", "shared")):
            step = last_of_all(evidence, self.slots, event, noted)
            if step is not None:
                text = (
                    f"step {step}"
                    if name == "arrived"
                    else f"every damaged slot is one that a prefix hit brought, the last one at step {step}"
                )
                setattr(self, name, text)


def _where(damage: Damage) -> str:
    if not damage.slots:
        return "no slot"
    slots = counted("slot", damage.slots[0]) if len(damage.slots) == 1 else f"{len(damage.slots)} slots"
    sources = damage.sources[0] if len(damage.sources) == 1 else f"{len(damage.sources)} sources"
    return f"{slots} in {sources}"
