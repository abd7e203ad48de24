"""`damage_of`: the `Damage` of an incident, by the evidence."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from canary_core.kinds.case import Copy, Damage
from canary_core.kinds.facts import Facts, counted
from canary_core.records import POSITION, STATES, WRITER
from canary_desk.incidents.evidence import Evidence
from canary_desk.incidents.happened import last_of_all

EVERY = 3
"""Fewest damaged tokens at equal distances for a pattern."""


def damage_of(found: Sequence[Facts], evidence: Evidence | None) -> Damage:
    """Cells that differ now, by the evidence, or differed by the BYTES findings ``found``."""
    named_in = {(v.slot, v.source): v.sources or (v.source,) for v in found if v.slot is not None and v.source}
    places = {(slot, name) for (slot, _), names in named_in.items() for name in names}
    if evidence is not None:
        rows, columns = evidence.differs.nonzero(as_tuple=True)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            places.add((int(evidence.slots[row]), evidence.sources[column].name))
    by_name = {} if evidence is None else {s.name: s for s in evidence.sources}
    sources = sorted({source for _, source in places})
    named = [by_name[s] for s in sources if s in by_name]
    damage = Damage(
        slots=sorted({slot for slot, _ in places}),
        sources=sources,
        layers={s.layer for s in named} or {v.layer for v in found if v.layer is not None},
        halves={s.half for s in named} or {v.half for v in found if v.half is not None},
        all_layers=len({s.layer for s in by_name.values()}),
        all_halves=len({s.half for s in by_name.values()}),
        cells=len(places),
        copies=[] if evidence is None else [c for c in evidence.copies if (c.slot, c.source) in places],
        looked_up=0 if evidence is None else evidence.looked_up,
    )
    damage.several = _several(named_in, damage)
    damage.where = _where(damage)
    up_to = "up to " * bool(damage.several)
    damage.layout = (f"{len(damage.slots)} slots, {up_to}{len(sources)} of {len(by_name) or '?'} sources are damaged",)
    damage.layout += (damage.several,) * bool(damage.several)
    if evidence is not None:
        damage.exchanged = _exchanged(damage.slots, evidence)
        damage.donors_intact = bool(damage.copies) and all(_intact(copy, evidence) for copy in damage.copies)
        _place(damage, evidence)
    return damage


def _several(named: Mapping[tuple[int, str], Sequence[str]], damage: Damage) -> str:
    """`Damage.several`, by the names of the sources of each finding's slot and source: of layers that share
    fingerprints all are known to differ only where all have the bytes of another slot."""
    copied = {(copy.slot, copy.source) for copy in damage.copies}
    groups = {
        group: len(names)
        for (slot, group), names in named.items()
        if len(names) > 1 and not copied.issuperset((slot, name) for name in names)
    }
    if not groups:
        return ""
    shown = ", ".join(f"{group} ({count})" for group, count in list(groups.items())[:3])
    more = f" and {len(groups) - 3} more groups" if len(groups) > 3 else ""
    return f"of {shown}{more}, which share fingerprints, several differ, and nothing says which"


def _exchanged(slots: Sequence[int], evidence: Evidence) -> dict[int, int]:
    """By damaged slot another slot, where in some source each has the bytes recorded of the other one."""
    found: dict[int, int] = {}
    for slot in slots:
        row = evidence.row(slot)
        if row is None:
            continue
        stored, present = evidence.stored[row], evidence.found[row]
        both = (evidence.found == stored) & (evidence.stored == present) & (stored != present) & (stored != 0)
        others = (both & (present != 0)).any(1).nonzero()[:, 0].tolist()
        if others:
            found[slot] = int(evidence.slots[others[0]])
    return found


def _intact(copy: Copy, evidence: Evidence) -> bool:
    """Whether the owner of the bytes has them itself. False where nobody looked."""
    row, column = evidence.row(copy.other_slot), evidence.column(copy.other_source)
    return row is not None and column is not None and bool(evidence.stored[row, column] == evidence.found[row, column])


def _place(damage: Damage, evidence: Evidence) -> None:
    """Adds the layout of the damaged slots in requests and pages."""
    records = [evidence.record(slot) for slot in damage.slots]
    writers = {record[WRITER] for record in records if record is not None}
    if len(writers) == 1:
        _of_one_request(damage, evidence, next(iter(writers)))
    _of_pages(damage, evidence)
    _of_history(damage, evidence)


def _of_one_request(damage: Damage, evidence: Evidence, writer: int) -> None:
    mine = evidence.written & (evidence.records[:, WRITER] == writer)
    positions = evidence.records[mine, POSITION] // STATES
    own = dict(zip(evidence.slots[mine].tolist(), positions.tolist(), strict=True))
    damaged = sorted({own[slot] for slot in damage.slots if slot in own})
    between = set(own.values()) - set(damaged)
    gaps = {b - a for a, b in pairwise(damaged)}
    if len(damaged) < EVERY or len(gaps) != 1:
        return
    (gap,) = gaps
    if gap > 1 and all(p in between for a in damaged[:-1] for p in range(a + 1, a + gap)):
        damage.every = gap


def _of_pages(damage: Damage, evidence: Evidence) -> None:
    size = evidence.page_size
    if size < 2:
        return
    taken = set(evidence.slots.tolist())
    written = set(evidence.slots[evidence.written].tolist())
    pages: dict[int, list[int]] = {}
    for slot in damage.slots:
        pages.setdefault(slot // size, []).append(slot % size)
    for which, place in (("first", 0), ("last", size - 1)):
        if len(pages) > 1 and all(places == [place] for places in pages.values()):
            damage.edge = True
            damage.edges = (f"the {which} slot of each of {len(pages)} pages of {size} slots is damaged",)
    if len(pages) != 1:
        return
    ((page, places),) = pages.items()
    mates = [i for i in range(size) if page * size + i in written]
    if not all(page * size + i in taken for i in range(size)) or len(mates) < 2:
        return
    if places == mates:
        damage.whole_page = (
            f"all {len(mates)} written slots of page {page} differ, and no other slot that was looked at"
        )
    elif places == mates[: len(places)] or places == mates[-len(places) :]:
        part = "first" if places == mates[: len(places)] else "last"
        damage.torn = f"only the {part} {len(places)} of {len(mates)} written slots of page {page} differ"


def _of_history(damage: Damage, evidence: Evidence) -> None:
    """Adds whether all damaged slots came with a load, or with a prefix hit."""
    arrived = last_of_all(evidence, damage.slots, "import_records", "arrive")
    if arrived is not None:
        damage.arrived = f"step {arrived}"
    shared = last_of_all(evidence, damage.slots, "share", "share")
    if shared is not None and len(damage.slots) > 1 and _all_of_the_hit(damage, evidence, shared):
        damage.shared = (
            f"what the prefix hit at step {shared} brought is damaged, as far as it was looked at: all of it"
        )


def _all_of_the_hit(damage: Damage, evidence: Evidence, step: int) -> bool:
    """Whether all slots are damaged that were shared at ``step``, and no other ones."""
    shared = {slot for slot in evidence.lives if any((h.step, h.event) == (step, "share") for h in evidence.life(slot))}
    return not shared or shared == set(damage.slots)


def _where(damage: Damage) -> str:
    if not damage.slots:
        return "no slot"
    slots = counted("slot", damage.slots[0]) if len(damage.slots) == 1 else f"{len(damage.slots)} slots"
    up_to = "up to " * bool(damage.several)
    sources = damage.sources[0] if len(damage.sources) == 1 else f"{up_to}{len(damage.sources)} sources"
    return f"{slots} in {sources}"
