"""`Story`: the content of a bundle, in the order of a reader's questions, for terminal and page alike."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from canary_core.config import CanaryConfig
from canary_core.config.shown import settings
from canary_core.incident import Incident
from canary_core.kinds.case import Pattern
from canary_core.kinds.classes import Diagnosis
from canary_core.records import FREED_BY, POSITION, STATES, STEP_FREED, STEP_WRITTEN, WRITER, Kind
from canary_core.region import RegionKind
from canary_core.violation import Violation
from canary_desk.explain.affected import Affected, StepTimes, affected, folded, self_test, summary, to_do
from canary_desk.explain.ranks import of_ranks
from canary_desk.explain.timeline import Moment, timeline
from canary_desk.incidents.bundle import Bundle, state_of
from canary_desk.incidents.diagnosis import diagnose
from canary_desk.incidents.evidence import Evidence
from canary_desk.incidents.patterns import patterns

MOST_HEAT_SLOTS = 48
"""Columns of the heat map."""

MOST_ROWS = 64
"""Rows of a table."""

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Heat:
    """Differing sources of slots. ``rows``: a source and a letter for each slot: ``x`` differs, ``l`` should have been
    written anew and was not, ``.`` is as recorded, ``?`` is unknown, a blank was not written. ``marks``: ``root``,
    ``found`` or nothing for each slot."""

    slots: list[int]
    marks: list[str]
    positions: list[str]
    rows: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Number:
    """One element of a slot, before and after. ``before`` is empty where unknown."""

    slot: int
    source: str
    element: int
    before: str
    after: str
    before_hex: str
    after_hex: str


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A record's fields."""

    slot: int
    page: int
    state: str
    position: str
    writer: str
    step_written: str
    freed: str
    differs: str


@dataclass(frozen=True, slots=True, eq=False)
class Story:
    """``headline``: the finding; ``facts``: the root's fields; ``kinds``: findings by kind, ``grew``: those of a moment
    later, empty if there were no more; ``shapes``: patterns of the damaged bytes; ``command``: repeats the check on the
    bundle alone; ``where``: machine, GPU and rank; ``ranks``: whether one rank alone reported the incident, empty with
    one rank; ``report``: text for the tracker, without names, tokens and paths."""

    name: str
    written: str
    headline: str
    facts: dict[str, str]
    diagnoses: list[Diagnosis]
    kinds: dict[str, int]
    grew: dict[str, int]
    timeline: list[Moment]
    heat: Heat | None
    numbers: list[Number]
    shapes: list[str]
    where: str
    when: str
    self_test: str
    affected: list[Affected]
    answers: str
    to_do: list[str]
    clock: list[str]
    signature: str
    ranks: str
    slots: list[SlotRow]
    table: list[tuple[str, str]]
    versions: dict[str, str]
    changed_settings: dict[str, str]
    coverage: str
    counters: dict[str, object]
    events: list[tuple[str, str, str]]
    after: list[tuple[str, str, str]]
    command: str
    report: str


def _where(about: Mapping[str, Any]) -> str:
    """The machine, the GPU, and the engine's process; as far as the bundle has them."""
    ranks = int(about.get("ranks", 1))
    parts = [
        f"machine {about['host']}" if about.get("host") else "",
        f"GPU {about['gpu']} ({about.get('pci')})" if about.get("gpu") else "",
        f"replica {about.get('replica', 0)}",
        f"rank {about.get('rank', 0)}" + (f" of {ranks}" if ranks > 1 else ""),
        f"process {about['pid']}" if about.get("pid") else "",
        f"model {about['model']}" if about.get("model") else "",
    ]
    return ", ".join(part for part in parts if part)


def _when(bundle: Bundle, clock: StepTimes) -> str:
    """The day, the time of the first finding as far as known, and since when the content may be wrong."""
    root = bundle.rebuilt().root
    day, _, told = str(bundle.manifest.get("written", "")).removesuffix("Z").partition("T")
    text = f"told on {day}, {clock.at(root.step) or told} UTC, step {root.step}"
    written = root.step_written or 0
    return text + (
        f"; the slot was written at step {written}, {clock.at(written)}" if written and clock.at(written) else ""
    )


def tell(bundle: Bundle) -> Story:
    """The story of a bundle."""
    incident, evidence = bundle.rebuilt(), bundle.evidence
    root = incident.root
    facts = {name: str(value) for name, value in root.fields().items() if name != "explanation"}
    versions = {str(k): str(v) for k, v in bundle.about.get("versions", {}).items()}
    after = {str(k): int(v) for k, v in bundle.after.get("kinds", {}).items()}
    kinds = {str(k): int(v) for k, v in bundle.incident["kinds"].items()}
    ranks, rows, clock = of_ranks(bundle), affected(bundle), StepTimes.of(bundle)
    moments = list(timeline(incident, evidence))
    return Story(
        name=bundle.path.name,
        written=str(bundle.manifest.get("written", "")),
        where=_where(bundle.about),
        headline=_capital(str(bundle.incident["root"].get("explanation", root.explanation))),
        facts=facts,
        diagnoses=bundle.diagnoses,
        kinds=kinds,
        grew={} if after == kinds else after,
        timeline=moments,
        when=_when(bundle, clock),
        self_test=self_test(bundle),
        affected=rows[:MOST_ROWS],
        answers=_capital(summary(rows, bundle.incident["total"] <= len(incident.findings))),
        to_do=to_do(bundle, rows),
        clock=[clock.at(moment.step) for moment in moments],
        signature=bundle.signature.text,
        heat=None if evidence is None else _heat(incident, evidence),
        numbers=[] if evidence is None else list(_numbers(evidence, bundle.patterns)),
        shapes=_shapes(bundle.patterns),
        ranks=ranks,
        slots=[] if evidence is None else list(_slots(incident, evidence)),
        table=_table(evidence),
        versions=versions,
        changed_settings=_changed(bundle.about.get("settings", {})),
        coverage=str(bundle.about.get("coverage", {}).get("summary", "")),
        counters=dict(bundle.about.get("stats", {})),
        events=list(folded([_event(event) for event in bundle.events[-MOST_ROWS:]])),
        after=list(folded([_event(event) for event in bundle.after.get("events", [])[:MOST_ROWS]])),
        command=f"canary explain {bundle.path.name} --check",
        report=_report(bundle, versions, ranks),
    )


def check(bundle: Bundle) -> list[str]:
    """Repeats the check on the bundle alone: sentences about differing results; none if all agree. Bytes in the bundle
    are fingerprinted and looked at again."""
    wrong, evidence, seen = [], bundle.evidence, bundle.patterns
    if evidence is not None and evidence.words and evidence.keys is not None:
        for column, source in enumerate(evidence.sources):
            again = evidence.keys.fingerprints(evidence.words[source.name], column)
            told = evidence.found[evidence.read, column]
            known = evidence.stored[evidence.read, column] != 0
            for place in ((again != told) & known).nonzero()[:, 0].tolist()[:4]:
                slot = int(evidence.slots[evidence.read[place]])
                wrong.append(f"the bytes of slot {slot} in {source.name} have another fingerprint than was found")
        seen = list(patterns(evidence))
        if seen != bundle.patterns:
            wrong.append("the bytes look otherwise than was told")
    found = diagnose(bundle.rebuilt(), evidence, seen)
    if [d.name for d in found] != [d.name for d in bundle.diagnoses] or found[0].sure != bundle.diagnoses[0].sure:
        told_then = ", ".join(d.name for d in bundle.diagnoses)
        wrong.append(f"the diagnosis is {', '.join(d.name for d in found)}, and was {told_then}")
    return wrong


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _heat(incident: Incident, evidence: Evidence) -> Heat:
    differs = evidence.differs
    found = {v.slot for v in incident.findings if v.region == evidence.region}
    order = evidence.slots.tolist()
    damaged = [i for i in range(len(order)) if bool(differs[i].any()) or order[i] in found]
    page, root = evidence.page_size, incident.root.slot
    beside = [i for i, s in enumerate(order) if root is not None and (s // page == root // page or abs(s - root) <= 4)]
    rows = sorted(dict.fromkeys([*damaged[: MOST_HEAT_SLOTS - 8], *beside][:MOST_HEAT_SLOTS]), key=lambda i: order[i])
    written = evidence.records[:, POSITION] & 3 != 0
    lost = {(v.slot, v.source) for v in incident.findings if v.kind is Kind.LOST_WRITE and v.region == evidence.region}

    def cell(row: int, column: int) -> str:
        if (order[row], evidence.sources[column].name) in lost:
            return "l"
        if not written[row]:
            return " "
        if int(evidence.stored[row, column]) == 0:
            return "?"
        return "x" if bool(differs[row, column]) else "."

    slots = [order[i] for i in rows]
    return Heat(
        slots,
        ["root" if s == root else "found" if s in found else "" for s in slots],
        [str(int(evidence.records[i, POSITION]) // STATES) if written[i] else "" for i in rows],
        [(s.name, "".join(cell(i, column) for i in rows)) for column, s in enumerate(evidence.sources)],
    )


def _numbers(evidence: Evidence, seen: Sequence[Pattern]) -> Iterator[Number]:
    """The changed elements, where the old ones are known; else the first of the root's bytes, if there."""
    facts = {s.name: s for s in evidence.sources}
    count = 0
    for pattern in seen:
        dtype = facts[pattern.source].dtype
        for word, old, new in zip(pattern.words, pattern.old, pattern.new, strict=True):
            before, after = _decoded(old, dtype), _decoded(new, dtype)
            for place, (was, now) in enumerate(zip(before, after, strict=True)):
                if was[1] != now[1] and count < MOST_ROWS:
                    count += 1
                    element = word * len(before) + place
                    yield Number(pattern.slot, pattern.source, element, was[0], now[0], was[1], now[1])
    if count or not evidence.words or not seen:
        return
    first = seen[0]
    row = evidence.row(first.slot)
    if row is None or row not in evidence.read:
        return
    words = evidence.words[first.source][evidence.read.index(row)][:8].tolist()
    for index, word in enumerate(words):
        decoded = _decoded(word & 0xFFFFFFFF, facts[first.source].dtype)
        for place, (value, text) in enumerate(decoded):
            yield Number(first.slot, first.source, index * len(decoded) + place, "", value, "", text)


def _decoded(word: int, dtype: str) -> list[tuple[str, str]]:
    """A 32-bit word's elements: each as a number and in hexadecimal."""
    raw = torch.tensor([word - (1 << 32) if word >> 31 else word], dtype=torch.int32)
    kind = _DTYPES.get(dtype)
    if kind is None:
        return [(str(b), f"0x{b:02x}") for b in raw.view(torch.uint8).tolist()]
    values = raw.view(kind)
    size = values.element_size()
    mask = (1 << 8 * size) - 1
    return [(f"{float(v):.6g}", f"0x{word >> 8 * size * i & mask:0{2 * size}x}") for i, v in enumerate(values.float())]


def _shapes(seen: Sequence[Pattern]) -> list[str]:
    names = {
        "bit": "a few bits of one word changed",
        "two_bits": "one bit changed in each of two words",
        "word": "one 32-bit word changed",
        "zeros": "all bytes are zero",
        "constant": "all bytes are the same",
        "nan": "most numbers are NaN or infinite",
        "other": "the bytes are unlike what they were, and nothing is special about them",
    }
    counts: dict[str, int] = {}
    for pattern in seen:
        counts[pattern.shape] = counts.get(pattern.shape, 0) + 1
    return [f"in {number} of {len(seen)} places: {names.get(shape, shape)}" for shape, number in counts.items()]


def _slots(incident: Incident, evidence: Evidence) -> Iterator[SlotRow]:
    found = {v.slot for v in incident.findings if v.region == evidence.region}
    differs = evidence.differs
    rows = sorted(range(len(evidence.slots)), key=lambda i: (int(evidence.slots[i]) not in found, i))
    for row in rows[:MOST_ROWS]:
        record, slot = evidence.records[row].tolist(), int(evidence.slots[row])
        count = int(differs[row].sum())
        written = record[STEP_WRITTEN] != 0
        freer = evidence.names.get(record[FREED_BY], "the engine")
        yield SlotRow(
            slot,
            slot // evidence.page_size,
            state_of(record),
            str(record[POSITION] // STATES) if written else "",
            evidence.names.get(record[WRITER], f"#{record[WRITER]}") if written else "",
            str(record[STEP_WRITTEN]) if written else "",
            f"step {record[STEP_FREED]}, {freer}" if record[STEP_FREED] else "",
            f"{count} of {len(evidence.sources)}" if count else "",
        )


def _table(evidence: Evidence | None) -> list[tuple[str, str]]:
    """Positions and slots of the request's row, runs of slots in a row together."""
    if evidence is None or not evidence.table:
        return []
    first = int(evidence.table["first_position"])
    numbered = [(first + i, int(s)) for i, s in enumerate(evidence.table["slots"]) if s >= 0]
    out = []
    for _, group in groupby(numbered, lambda pair: pair[1] - pair[0]):
        run = list(group)
        (p, s), (last_p, last_s) = run[0], run[-1]
        out.append((str(p) if p == last_p else f"{p} to {last_p}", str(s) if s == last_s else f"{s} to {last_s}"))
    return out[:MOST_ROWS]


def _changed(told: Mapping[str, object]) -> dict[str, str]:
    """Settings with other values than the defaults."""
    defaults = {s.variable: s.default for s in settings(CanaryConfig.model_construct())}
    return {name: str(value) for name, value in told.items() if str(value) != defaults.get(name, str(value))}


def _event(event: Mapping[str, object]) -> tuple[str, str, str]:
    rest = {k: v for k, v in event.items() if k not in ("time", "event", "level", "explanation", "traceback")}
    text = ", ".join(f"{name}={value}" for name, value in rest.items())
    return str(event.get("level", "")), str(event.get("event", "")), text if len(text) < 400 else f"{text[:400]} ..."


def _report(bundle: Bundle, versions: Mapping[str, str], ranks: str) -> str:
    """For the engine's tracker: requests are numbered, nothing names tokens, paths or hosts."""
    incident, evidence = anonymous(bundle)
    found = diagnose(incident, evidence, bundle.patterns)
    kinds = ", ".join(f"{kind} {number}" for kind, number in bundle.incident["kinds"].items())
    own = {k: v for k, v in versions.items() if k != "platform"}
    changed = _changed(bundle.about.get("settings", {}))
    lines = [
        f"KV cache: {incident.root.kind.name.lower()} found by Canary",
        "",
        incident.root.redacted().explanation,
        "",
        f"Findings of one cause: {kinds}",
        "",
        f"Diagnosis ({found[0].sure}): {found[0].sentence}",
        *(f"- {text}" for text in found[0].evidence),
        "",
        "Timeline of the slot:",
        *(f"- {m.when}: {m.text}" for m in timeline(incident, evidence)),
        "",
        f"Region {incident.root.region}" + ("" if evidence is None else _about(evidence)),
        f"Versions: {', '.join(f'{k} {v}' for k, v in own.items())}",
        f"Settings: {', '.join(f'{k}={v}' for k, v in changed.items()) or 'defaults'}",
    ]
    lines.append(f"Where: rank {bundle.about.get('rank', 0)} of {bundle.about.get('ranks', 1)}")
    if ranks:
        lines.append(f"Ranks: {ranks}")
    if found[0].bugs:
        lines.append(f"Resembles: {', '.join(found[0].bugs)}")
    return "\n".join(lines)


def _about(evidence: Evidence) -> str:
    layers = len({s.layer for s in evidence.sources})
    dtypes = ", ".join(sorted({s.dtype or "packed bytes" for s in evidence.sources}))
    kind = "" if evidence.kind == RegionKind.FULL.value else f"{evidence.kind}, "
    return f": {kind}{evidence.slot_count} slots in pages of {evidence.page_size}, {layers} layers, {dtypes}"


def anonymous(bundle: Bundle) -> tuple[Incident, Evidence | None]:
    """Incident and evidence with numbers in place of the requests' names, and without tokens."""
    incident, evidence = bundle.rebuilt(), bundle.evidence
    names = dict.fromkeys(incident.requests)
    if evidence is not None:
        names |= dict.fromkeys(evidence.names.values())
    number = {name: f"request {i + 1}" for i, name in enumerate(names)}
    renamed = Incident(_renamed(incident.root, number), number=incident.number, told=True)
    for violation in incident.findings:
        renamed.add(_renamed(violation, number))
    if evidence is not None:
        evidence = replace(evidence, names={writer: number[name] for writer, name in evidence.names.items()})
    return renamed, evidence


def _renamed(violation: Violation, number: Mapping[str, str]) -> Violation:
    def called(name: str | None) -> str | None:
        return None if name is None else number.get(name, "another request")

    return replace(
        violation.redacted(),
        request=called(violation.request),
        stored_request=called(violation.stored_request),
        freed_by=called(violation.freed_by),
    )
