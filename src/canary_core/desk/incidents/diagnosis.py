"""`diagnose`: what probably happened, from the pattern of an incident's findings and from the evidence."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from canary_core.desk.incidents.damage import Damage
from canary_core.desk.incidents.evidence import Copy, Evidence
from canary_core.desk.incidents.happened import handed_out_late, was_cached
from canary_core.desk.incidents.patterns import Pattern
from canary_core.incident import Incident
from canary_core.kinds.classes import SURE, Diagnosis
from canary_core.records import FREED_BY, POSITION, STATES, STEP_FREED, STEP_WRITTEN, WRITER, Kind, Phase, State
from canary_core.violation import NAMELESS, Violation, counted, named

FILLS = ("zeros", "constant", "nan")
"""Shapes of bytes that say by themselves what they are, whoever else has such."""


@dataclass(slots=True, eq=False)
class Case:
    """What there is to go by. ``evidence`` None: only the findings."""

    incident: Incident
    evidence: Evidence | None
    patterns: Sequence[Pattern]

    @property
    def root(self) -> Violation:
        """The incident's first finding by cause."""
        return self.incident.root

    def of(self, *kinds: Kind) -> list[Violation]:
        """Findings of these kinds."""
        return [v for v in self.incident.findings if v.kind in kinds]


def diagnose(incident: Incident, evidence: Evidence | None, patterns: Sequence[Pattern]) -> tuple[Diagnosis, ...]:
    """The likely classes, the surest first; at least one."""
    case = Case(incident, evidence, patterns)
    found = list(_RULES[incident.root.kind](case)) or [Diagnosis("unknown", "possible", ("no pattern was recognised",))]
    first: dict[str, Diagnosis] = {}
    for diagnosis in sorted(found, key=lambda d: SURE.index(d.sure)):
        first.setdefault(diagnosis.name, diagnosis)
    return tuple(first.values())


def _bytes(case: Case) -> Iterator[Diagnosis]:
    damage = Damage.of(case.of(Kind.BYTES), case.evidence)
    where = damage.where
    shapes = Counter(p.shape for p in case.patterns)
    if sum(shapes[fill] for fill in FILLS) * 2 <= len(case.patterns):
        yield from _copied(case, damage)
    if shapes and len(shapes) == 1 and len(damage.slots) <= 2:
        yield from _flips(case, shapes, where)
    most, count = shapes.most_common(1)[0] if shapes else ("", 0)
    share = f"{count} of {len(case.patterns)} that were looked at"
    if most == "zeros" and count * 2 > len(case.patterns):
        yield Diagnosis("zeroed", "likely", (f"all bytes are zero in {where}: {share}", *damage.layout))
    if most == "constant" and count * 2 > len(case.patterns):
        values = Counter(p.byte for p in case.patterns if p.shape == "constant")
        value = values.most_common(1)[0][0]
        nan = any(p.not_finite > 0.5 for p in case.patterns)
        fill = f"every byte is 0x{value:02x} in {where}: {share}"
        yield Diagnosis("poisoned" if nan else "constant", "likely", (fill, *damage.layout))
    if most == "nan" and count * 2 > len(case.patterns):
        yield Diagnosis("poisoned", "likely", (f"most numbers are NaN or infinite in {where}: {share}", *damage.layout))
    yield from _spread(case, damage)


def _flips(case: Case, shapes: Counter[str], where: str) -> Iterator[Diagnosis]:
    if "bit" in shapes or "two_bits" in shapes:
        told = tuple(sentence for p in case.patterns for sentence in _told_bits(p))
        yield Diagnosis(
            "flipped_bit", "certain" if len(case.patterns) == 1 else "likely", (*told, f"nothing but {where} differs")
        )
    elif "word" in shapes:
        told = tuple(
            f"word {p.words[0]} of slot {p.slot} in {p.source} was 0x{p.old[0]:08x} and is 0x{p.new[0]:08x}"
            for p in case.patterns
        )
        yield Diagnosis("overwritten_word", "likely", (*told, f"nothing but {where} differs"))


def _told_bits(pattern: Pattern) -> Iterator[str]:
    for word, old, new in zip(pattern.words, pattern.old, pattern.new, strict=True):
        bits = [bit for bit in range(32) if (old ^ new) >> bit & 1]
        named = ", ".join(f"bit {bit}" for bit in bits)
        yield (
            f"{named} of 32-bit word {word} of slot {pattern.slot} in {pattern.source}: the word was 0x{old:08x} and "
            f"is 0x{new:08x}; by the fingerprint no other single change explains it"
        )


def _copied(case: Case, damage: Damage) -> Iterator[Diagnosis]:
    """The bytes that were found are those that other slots' records speak of."""
    evidence = case.evidence
    if evidence is None or not damage.copies:
        return
    own = [c for c in damage.copies if c.source == c.other_source]
    explained = len({(c.slot, c.source) for c in own})
    across = [c for c in damage.copies if c.source != c.other_source]
    if across and not own:
        copy, sure = across[0], "certain" if damage.cells == 1 else "likely"
        text = (
            f"slot {copy.slot} has in {copy.source} what was recorded of slot {copy.other_slot} in {copy.other_source}"
        )
        yield Diagnosis("wrong_layer", sure, (text, *damage.layout))
        return
    sure = "certain" if explained * 5 > 4 * evidence.looked_up else "possible"
    moved = {c.slot: c.other_slot for c in own}
    told = tuple(_told_copy(evidence, copy, own) for copy in _one_of_each(own)[:3])
    count = f"of {evidence.looked_up} damaged places, {explained} have bytes that the records of another slot know"
    told = (*told, count, *damage.layout)
    back = [slot for slot, other in moved.items() if moved.get(other) == slot]
    if back:
        yield Diagnosis("swapped", sure, told)
        return
    off = [slot for slot, other in moved.items() if _follows(evidence, other, slot)]
    if len(off) * 2 > len(moved):
        text = (
            f"{len(off)} of {len(moved)} slots hold the KV of the position before or after theirs, of the same request"
        )
        yield Diagnosis("shifted", sure, (text, *told))
        return
    yield Diagnosis("overwritten", sure, told)


def _one_of_each(copies: Sequence[Copy]) -> list[Copy]:
    """The first one of each slot."""
    return list({copy.slot: copy for copy in reversed(copies)}.values())[::-1]


def _follows(evidence: Evidence, other: int, slot: int) -> bool:
    """Whether one slot holds the position next to the other's, of the same writer."""
    one, two = evidence.record(other), evidence.record(slot)
    if one is None or two is None:
        return False
    return one[WRITER] == two[WRITER] and abs(one[POSITION] // STATES - two[POSITION] // STATES) == 1


def _told_copy(evidence: Evidence, copy: Copy, copies: Sequence[Copy]) -> str:
    record = evidence.record(copy.other_slot)
    sources = [c.source for c in copies if (c.slot, c.other_slot) == (copy.slot, copy.other_slot)]
    where = ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
    text = f"slot {copy.slot} has, in {where}, the bytes that belong to slot {copy.other_slot}"
    if record is None or not record[STEP_WRITTEN]:
        return text
    who = named(evidence.names.get(record[WRITER])) or NAMELESS
    text += f", which {who} wrote at step {record[STEP_WRITTEN]} as position {record[POSITION] // STATES}"
    if record[POSITION] & State.FREED and record[STEP_FREED]:
        text += f"; it was freed at step {record[STEP_FREED]}"
        freer = named(evidence.names.get(record[FREED_BY]))
        text += f" by {freer}" if freer else ""
    return text


def _spread(case: Case, damage: Damage) -> Iterator[Diagnosis]:
    """Where the damage is, whatever the bytes are."""
    evidence = case.evidence
    if damage.arrived:
        yield Diagnosis("load_back", "likely", (f"every damaged slot was loaded at {damage.arrived}", *damage.layout))
    if damage.every is not None:
        text = f"the damaged positions are {damage.every} apart, and those between are intact"
        yield Diagnosis("page_edge" if damage.edge else "every_nth", "likely", (text, *damage.edges, *damage.layout))
    elif damage.edge:
        yield Diagnosis("page_edge", "likely", (*damage.edges, *damage.layout))
    if damage.torn:
        yield Diagnosis("torn_copy", "likely" if len(damage.slots) > 1 else "possible", (damage.torn, *damage.layout))
    one_half = len(damage.halves) == 1 and evidence is not None and len({s.half for s in evidence.sources}) > 1
    if one_half and len(damage.layers) > 1 and len(damage.layers) == damage.all_layers:
        (half,) = damage.halves
        yield Diagnosis(
            "one_half", "likely", (f"only {half} differs, in all {damage.all_layers} layers", *damage.layout)
        )
    if len(damage.layers) == 1 and len(damage.slots) > 2 and damage.all_layers > 1:
        yield Diagnosis("one_layer", "likely", (f"only layer {next(iter(damage.layers))} differs", *damage.layout))
    if damage.whole_page:
        yield Diagnosis("page_overwritten", "likely", (damage.whole_page, *damage.layout))
    if damage.shared:
        yield Diagnosis("prefix_hit", "possible", (damage.shared, *damage.layout))
    yield Diagnosis(
        "stray_write", "likely" if damage.cells == 1 else "possible", (f"{damage.where} differs", *damage.layout)
    )


def _lost(case: Case) -> Iterator[Diagnosis]:
    lost = case.of(Kind.LOST_WRITE)
    sources = sorted({v.source for v in lost if v.source})
    every = len(case.evidence.sources) if case.evidence is not None else 0
    layers = {v.layer for v in lost}
    listed = ", ".join([*sources[:4], *(["..."] if len(sources) > 4 else [])])
    where = f" of {listed}" if listed else ""
    told = [f"{len({v.slot for v in lost})} slots{where} were not written at step {case.root.step}"]
    elsewhere = case.of(Kind.BYTES)
    if elsewhere:
        told.append(f"the bytes of {_slot(elsewhere[0])} changed at the same time: the store may have gone there")
    everything = len(sources) == every if every else len(layers) > 1
    yield Diagnosis("lost_write" if everything else "lost_write_of_a_layer", "likely", tuple(told))


def _read_wrongly(case: Case) -> Iterator[Diagnosis]:
    """The root is a slot that holds another position, token or sequence than the one that is read."""
    root, evidence = case.root, case.evidence
    right = None if evidence is None else evidence.right_slot
    here = f"{_slot(root)} at {counted('position', root.position)} of {_reader(root)}"
    own = root.request is not None and root.stored_request == root.request
    writer = named(root.stored_request) or NAMELESS
    told = [f"{here} holds {counted('position', root.stored_position, 'another')} of {writer}"]
    if root.identity:
        other = root.stored_identity or "another identity"
        told = [f"{told[0]}, which was computed for {other}; {_reader(root)} has {root.identity}"]
        yield Diagnosis("foreign_prefix", "certain", tuple(told))
        return
    found = case.of(Kind.POSITION, Kind.TOKEN, Kind.PREFIX)
    moved = Counter(
        v.stored_position - v.position for v in found if v.position is not None and v.stored_position is not None
    )
    if right is not None and right != root.slot:
        told.append(f"what it should read is intact in slot {right}")
        if own and root.stored_position != root.position and moved:
            ((off, count),) = moved.most_common(1)
            told.append(f"{count} of {len(found)} findings are {off:+d} positions off")
            yield Diagnosis("wrong_position", "likely", tuple(told))
        else:
            yield Diagnosis("stale_table", "likely", tuple(told))
        return
    if own and root.stored_position == root.position:
        when = "" if root.step_written is None else f" at step {root.step_written}"
        told.append(f"the request itself wrote another token there{when}")
        yield Diagnosis("rolled_back", "likely", tuple(told))
        return
    if own:
        yield Diagnosis("wrong_position", "likely", tuple(told))
        return
    later = evidence is not None and handed_out_late(evidence, root)
    if later:
        told.append(later)
        yield Diagnosis("double_allocation", "possible", tuple(told))
    in_place = root.stored_position == root.position or root.kind is Kind.PREFIX
    began = evidence is None or evidence.reader_began
    if in_place:
        told.append("the position is right, the sequence is another one; the request has never written it itself")
    if not began:
        told.append("the request has written nothing yet, so a prefix hit brought it")
    if in_place or not began:
        yield Diagnosis("foreign_prefix", "likely", tuple(told))
    yield Diagnosis("stale_table", "possible", tuple(told))


def _slot(root: Violation) -> str:
    return counted("slot", root.slot)


def _reader(root: Violation) -> str:
    return named(root.request) or NAMELESS


def _unwritten(case: Case) -> Iterator[Diagnosis]:
    root, evidence = case.root, case.evidence
    told = [f"{_slot(root)} at {counted('position', root.position)} of {_reader(root)} holds nothing"]
    right = None if evidence is None else evidence.right_slot
    if right is not None and right != root.slot:
        told.append(f"what it should read is intact in slot {right}")
        yield Diagnosis("stale_table", "likely", tuple(told))
        return
    shared = evidence is not None and was_cached(evidence, root.slot)
    first = evidence is not None and not evidence.reader_began
    if root.stored_state is State.PARKED or shared or first:
        told.append(
            "the prefix cache has it"
            if root.stored_state is State.PARKED
            else "a prefix hit brought it" + (": the request has written nothing yet" if first else "")
        )
        yield Diagnosis("unfilled_prefix", "likely", tuple(told))
        return
    yield Diagnosis("unwritten", "likely", tuple(told))
    yield Diagnosis("unfilled_prefix", "possible", tuple(told))


def _freed(case: Case) -> Iterator[Diagnosis]:
    root = case.root
    who, when = named(root.freed_by) or "the engine", root.step_freed
    told = [f"{who} freed {_slot(root)}" + (f" at step {when}" if when else "")]
    if root.phase is Phase.EVENT:
        told.append(f"{_reader(root)} was given it by the prefix cache")
    else:
        told.append(
            f"{_reader(root)} reads it at step {root.step}"
            + (": the same request" if root.freed_by and root.freed_by == root.request else "")
        )
    pages = len(case.incident.pages)
    told.append(f"{len(case.incident.slots)} slots of {pages} pages are concerned")
    yield Diagnosis("use_after_free", "likely", tuple(told))


def _named(name: str) -> Callable[[Case], Iterator[Diagnosis]]:
    """For kinds that say by themselves what happened."""

    def rule(case: Case) -> Iterator[Diagnosis]:
        yield Diagnosis(name, "likely", (replace(case.root, token=None, stored_token=None).explanation,))

    return rule


_RULES: dict[Kind, Callable[[Case], Iterator[Diagnosis]]] = {
    Kind.BYTES: _bytes,
    Kind.LOST_WRITE: _lost,
    Kind.POSITION: _read_wrongly,
    Kind.TOKEN: _read_wrongly,
    Kind.PREFIX: _read_wrongly,
    Kind.UNWRITTEN: _unwritten,
    Kind.FREED: _freed,
    Kind.WRITE_AFTER_FREE: _named("write_after_free"),
    Kind.DOUBLE_FREE: _named("double_free"),
    Kind.DOUBLE_ALLOC: _named("double_allocation"),
    Kind.EVICTED_IN_USE: _named("evicted_in_use"),
    Kind.TWO_WRITERS: _named("two_writers"),
    Kind.WRITE_SLOT: _named("wrong_write_slot"),
    Kind.WRITE_INPUT: _named("batch_input"),
    Kind.SLOT_RANGE: _named("broken_table"),
    Kind.NULL_SLOT: _named("padding"),
    Kind.CACHE_STRUCTURE: _named("broken_cache"),
    Kind.NON_FINITE: _named("non_finite"),
    Kind.ARRIVAL: _named("load_back"),
    Kind.READ_TABLE: _named("wrong_table_copy"),
}
"""By the kind of the root."""
