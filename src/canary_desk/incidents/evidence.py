"""`Evidence`: copies from pool and records about an incident, taken once, right after its finding.

`take` issues the copies from the engine's thread, behind the engine's stream's present work, and waits for nothing; the
rest is host work for another thread. Nothing here runs without a finding.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.incident import Incident
from canary_core.kinds.case import Copy
from canary_core.ops import histories
from canary_core.ops.fingerprint_keys import PUBLIC, FingerprintKeys
from canary_core.ops.histories import Happening
from canary_core.ops.state import RegionState
from canary_core.ops.sums import PER_GROUP
from canary_core.ops.torch import plan
from canary_core.ops.torch.stack import stacks
from canary_core.ops.torch.sums import stored_and_found, summed
from canary_core.ops.upload import upload
from canary_core.records import HISTORY, POSITION, STATES, STEP_WRITTEN, WRITER, Clock, Kind, State, Status
from canary_core.region import Region
from canary_core.runtime.host_copy import HostCopy
from canary_core.runtime.journal import Entry
from canary_core.violation import Violation

MOST_SLOTS = 384
"""Most slots with records and fingerprints taken."""

MOST_FOUND = 96
"""Of these, most slots named by findings."""

MOST_PAGE = 32
"""Of these, most slots beside the root's in its page."""

MOST_OF_WRITER = 192
"""Of these, most slots written by the root's writer."""

MOST_READ = 64
"""Most slots with bytes taken."""

MOST_READ_BYTES = 16 << 20
"""Most bytes taken in all."""

TABLE_ROW = 128
"""Positions taken from the table's row."""

MOST_LOOKUPS = 24
"""Most findings whose fingerprint is looked for among all records."""


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts about a source. ``dtype``: as printed by torch, empty for packed bytes. ``words``: 32-bit words of one
    slot, each chunk's last one padded."""

    name: str
    layer: int
    half: str
    dtype: str
    chunks: int
    chunk_bytes: int
    words: int


@dataclass(slots=True, eq=False)
class Evidence:
    """Evidence about one region, all on the host. Slots are in no order, each once.

    slots: int64 ``[n]``. records: int32 ``[n, 8]``. stored, found: int64 ``[n, sources]``, the fingerprints recorded,
    and those of the present bytes; where `stored` is 0 nothing is known.
    read: indices into ``slots`` of slots with bytes taken, the root's first. words: by source, int32 ``[len(read),
    words]``. copies: see `Copy`. looked_up: number of damaged places whose bytes were looked for among the records of
    their own source.
    right_slot: the slot with the right content for the root's request, None if there is none or it was not looked for.
    reader_began: whether the root's request had written anything before; if not, all of its reads come from a prefix
    hit. reader_last: the last position that it had written, -1 for none, None where nobody looked.
    history: the calls about the region, oldest first. lives: by slot the last events noted by the device, oldest first;
    empty where the region has no histories. names: requests by writer id.
    table: the row of the root's request around the root's position, as ``first_position`` and ``slots``, None if the
    request was not in the last forward. keys: those of the fingerprints, None in a bundle of a secret that is not here.
    """

    region: str
    kind: str
    slot_count: int
    page_size: int
    sources: tuple[SourceFacts, ...]
    slots: Tensor
    records: Tensor
    stored: Tensor
    found: Tensor
    read: list[int]
    words: dict[str, Tensor]
    copies: list[Copy] = field(default_factory=list)
    looked_up: int = 0
    right_slot: int | None = None
    reader_began: bool = True
    history: list[Entry] = field(default_factory=list)
    lives: dict[int, list[Happening]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    table: dict[str, Any] | None = None
    reader_last: int | None = None
    keys: FingerprintKeys | None = PUBLIC

    @property
    def differs(self) -> Tensor:
        """Whether a written slot's bytes differ from the recorded ones: bool ``[n, sources]``."""
        return (self.stored != self.found) & (self.stored != 0) & self.written[:, None]

    @property
    def written(self) -> Tensor:
        """Whether a slot holds what a forward wrote: bool ``[n]``."""
        return self.records[:, POSITION] & 3 == State.WRITTEN

    def row(self, slot: int) -> int | None:
        """Index of ``slot`` in ``slots``, None if not taken."""
        place = (self.slots == slot).nonzero()
        return int(place[0]) if len(place) else None

    def record(self, slot: int) -> list[int] | None:
        """The record's eight words, None if the slot was not taken."""
        row = self.row(slot)
        return None if row is None else self.records[row].tolist()

    def writer(self, name: str | None) -> int | None:
        """The writer id of the request, None without a name, or if no slot or call has to do with it."""
        return next((writer for writer, known in self.names.items() if known == name), None) if name else None

    def life(self, slot: int | None) -> list[Happening]:
        """Events of ``slot`` from the last hand-out or clearing on, oldest first; empty if unknown, or if too many
        events have pushed that one out."""
        told = self.lives.get(-1 if slot is None else slot, [])
        begun = [i for i, h in enumerate(told) if h.event in ("alloc", "clear")]
        if begun:
            return told[begun[-1] :]
        return told if sum(not h.every for h in told) < HISTORY else []

    def column(self, source: str | None) -> int | None:
        """Index of the source with the name."""
        return next((i for i, s in enumerate(self.sources) if s.name == source), None)


@dataclass(slots=True, eq=False)
class Taken:
    """Copies on their way to the host; `evidence` waits for them, on any thread."""

    state: RegionState
    known: int
    sources: tuple[SourceFacts, ...]
    lookups: list[tuple[int, int, int]]
    copy: HostCopy
    history: list[Entry]
    history_copies: list[HostCopy]

    def evidence(self) -> Evidence:
        """Waits for the device, and puts the copies together."""
        self.copy.wait()
        slots, records, stored, found, matches, right, row, past, step, *words = self.copy.tensors
        region = self.state.region
        count = region.slots
        # The device lists some slots twice, and those that it did not find as one beyond the region.
        first: dict[int, int] = {}
        for place, slot in enumerate(slots.tolist()):
            if 0 <= slot < count:
                first.setdefault(slot, place)
        rows = torch.tensor(list(first.values()), dtype=torch.int64, device="cpu")
        order = {slot: index for index, slot in enumerate(first)}
        read_slots = [slot for slot in slots[: self.known].tolist() if 0 <= slot < count]
        read = [order[slot] for slot in read_slots]
        kept = [place for place, slot in enumerate(slots[: self.known].tolist()) if 0 <= slot < count]
        evidence = Evidence(
            region.name,
            region.kind.value,
            count,
            region.sources[0].page_size,
            self.sources,
            slots[rows].clone(),
            records[rows].clone(),
            stored[rows].clone(),
            found[rows].clone(),
            read,
            {s.name: w[kept].clone() for s, w in zip(self.sources, words, strict=True)},
            keys=self.state.sources.fingerprint_keys,
        )
        for (slot, column, other_column), (hit, other) in zip(self.lookups, matches.tolist(), strict=True):
            evidence.looked_up += column == other_column
            if hit:
                names = self.sources[column].name, self.sources[other_column].name
                evidence.copies.append(Copy(slot, names[0], other, names[1]))
        hit, place, began, last = right.tolist()
        evidence.right_slot, evidence.reader_began = place if hit else None, bool(began)
        evidence.reader_last = None if last < -1 else last
        if len(row):
            evidence.table = {"first_position": int(row[0]), "slots": row[1:].tolist()}
        for copy in self.history_copies:
            copy.wait()
        evidence.history = self.history
        if len(past):
            now, rows_of = int(step[0]), past.tolist()
            every = histories.read(rows_of[-1], now, every=True)
            evidence.lives = {s: histories.life(histories.read(rows_of[i], now), every) for s, i in first.items()}
        return evidence


def take(
    state: RegionState,
    incident: Incident,
    history: Sequence[Entry],
    reader: int | None = None,
    view: BatchView | None = None,
) -> Taken:
    """Issues the copies of all evidence on ``incident`` in the region of ``state``, on the current stream, after its
    records are complete there. ``reader``: the writer id of the root's request; ``view``: of the last forward. Never
    captured; never waits."""
    device, region = state.records.device, state.region
    asked = _asked(incident, region.name, state)
    slots = upload(asked, device)
    # While the engine makes other tensors nothing is known of bytes.
    lookups = list(_lookups(incident, state)) if state.readable else []
    matches = _matches(state, lookups, device)
    every = torch.arange(region.slots, device=device)
    root = slots[:1].clamp(0, region.slots - 1)
    written = state.records[:, POSITION] & 3 == State.WRITTEN
    of_writer = written & (state.records[:, WRITER] == state.records[root, WRITER])
    most = min(MOST_OF_WRITER, region.slots)
    mates = torch.where(of_writer, every, region.slots).topk(most, largest=False).values
    right = upload([0, 0, 1, -2], device)
    position = incident.root.position
    if reader is not None and position is not None:
        holds = written & (state.records[:, WRITER] == reader) & (state.records[:, POSITION] // STATES == position)
        earlier = (state.records[:, WRITER] == reader) & (state.records[:, STEP_WRITTEN] < incident.root.step)
        earlier &= state.records[:, STEP_WRITTEN] > 0
        last = torch.where(earlier, state.records[:, POSITION] // STATES, -1).max()
        right = torch.stack((holds.any().long(), holds.int().argmax(), earlier.any().long(), last.long()))
    known = slots[: _readable(state)]
    # Where a record has the bytes that were found, its slot's own bytes are worth a look, too.
    donors = torch.where(matches[:, 0] != 0, matches[:, 1], region.slots)[:MOST_READ]
    every_slot = torch.cat((slots, donors, mates))
    safe = every_slot.clamp(0, region.slots - 1)
    records = state.records[safe]
    stored, found = _fingerprints(state, safe)
    words: list[Tensor] = [torch.zeros(0, device="cpu")] * len(state.sources)
    for stack in stacks(state) if state.readable else ():
        read = known.clamp(0, region.slots - 1)
        content = stack.words(torch.where(stack.like.has_bytes(read), read, 0)).to(torch.int32)
        for place, column in enumerate(stack.indices):
            words[column] = content[place]
    row = _table_row(state, view, reader, position)
    copies = [HostCopy(t) for e in history for t in (e.slots, e.other) if t is not None and t.is_cuda]
    copied = iter(copies)
    past = torch.zeros((0, HISTORY), dtype=torch.int64, device=device)
    if state.histories is not None:
        past = torch.cat((state.histories[safe], state.histories[-1:]))
    # On a CPU nothing is copied, and the clock goes on.
    step = state.shared.clock[Clock.NEXT : Clock.NEXT + 1].clone()
    copy = HostCopy(every_slot, records, stored, found, matches, right, row, past, step, *words)
    return Taken(state, len(known), _facts(state), lookups, copy, [_on_host(e, copied) for e in history], copies)


def _fingerprints(state: RegionState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Recorded and found, int64 ``[n, sources]``, the same where no bytes can be read."""
    if state.readable:
        return stored_and_found(state, slots)
    stored = state.fingerprints[slots][:, [state.sources.column_of(i) for i in range(len(state.sources))]]
    return stored, stored.clone()


def _table_row(state: RegionState, view: BatchView | None, reader: int | None, position: int | None) -> Tensor:
    """The first position, then the slots of the table's row of ``reader`` from there on, -1 where there is none: int64
    ``[1 + n]``, empty where that can't be said."""
    device, name = state.records.device, state.region.name
    if view is None or reader is None or position is None or name not in view.tables or not view.rows:
        return torch.zeros(0, dtype=torch.int64, device=device)
    table = view.tables[name]
    first = max(0, position - TABLE_ROW // 2)
    # One element, not none: an index without dimensions would be read on the host.
    row = (view.writers == reader).int().argmax()[None]
    places = plan.Places(row.expand(TABLE_ROW), torch.arange(first, first + TABLE_ROW, device=device))
    slot, status = plan.lookup(state.region, table, places)
    there = (view.writers[row] == reader) & (places.position < view.prefix_lens[row] + view.new_lens[row])
    listed = torch.where(there & (status == Status.OK), slot, -1)
    return torch.cat((torch.full((1,), first, dtype=torch.int64, device=device), listed))


def _on_host(entry: Entry, copied: Iterator[HostCopy]) -> Entry:
    """``entry`` with the copies in place of device tensors."""
    for name in ("slots", "other"):
        tensor = getattr(entry, name)
        if tensor is not None and tensor.is_cuda:
            entry = replace(entry, **{name: next(copied).tensors[0]})  # type: ignore[arg-type]  # one of the two
    return entry


def _asked(incident: Incident, region: str, state: RegionState) -> list[int]:
    """The slots to take: the root's and its neighbours, those of findings, the others of the root's page."""
    count = state.region.slots
    named = [v.slot for v in (incident.root, *incident.findings) if v.region == region and v.slot is not None]
    slots = dict.fromkeys(s for s in named if 0 <= s < count)
    found = list(slots)[:MOST_FOUND]
    if not found:
        return [0]
    root, page = found[0], state.region.sources[0].page_size
    first = root // page * page
    mates = range(first, min(first + min(page, MOST_PAGE), count))
    beside = (root - 1, root + 1)
    wanted = (root, *beside, *found[:48], *mates, *found[48:], first - 1, first + page)
    return list(dict.fromkeys(s for s in wanted if 0 <= s < count))


def _readable(state: RegionState) -> int:
    """Of how many slots the bytes are taken."""
    if not state.readable:
        return 0
    return max(4, min(MOST_READ, MOST_READ_BYTES // max(state.sources.slot_bytes, 1)))


def _lookups(incident: Incident, state: RegionState) -> list[tuple[int, int, int]]:
    """Slot, source, and source to search: for findings about bytes their own one, for the first one all similar ones,
    since a copy may have gone to another layer. Of sources that share fingerprints only all together are looked for."""
    columns = {label.name: i for i, label in enumerate(state.sources.labels)}
    out: list[tuple[int, int, int]] = []
    for violation in _of_bytes(incident, state.region, columns):
        column = columns[violation.source or ""]
        slot = violation.slot or 0
        if state.sources.sums:
            out += [(slot, columns[name], columns[name]) for name in violation.sources or ()]
            continue
        out.append((slot, column, column))
        if len(out) == 1:
            like = state.sources[column].slot_words
            out += [(slot, column, o) for o, s in enumerate(state.sources) if o != column and s.slot_words == like]
    return out


def _of_bytes(incident: Incident, region: Region, names: Collection[str]) -> list[Violation]:
    of_region = [v for v in incident.findings if v.kind is Kind.BYTES and v.region == region.name]
    # A finding that a plugin made may name anything, and an index beyond a tensor ends a GPU's process.
    found = [v for v in of_region if v.found_value and v.source in names and 0 <= (v.slot or 0) < region.slots]
    # From everywhere in the list, not from one end of it.
    return found[:1] + found[1 :: -(-len(found) // MOST_LOOKUPS)] if len(found) > MOST_LOOKUPS else found


def _matches(state: RegionState, lookups: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """For each lookup whether a record has the fingerprint, and its slot: int64 ``[lookups, 2]``. Slots written before
    and freed since count as well."""
    if not lookups:
        return torch.zeros((0, 2), dtype=torch.int64, device=device)
    if state.sources.sums:
        return _group_matches(state, lookups)
    values = _found_values(state, lookups, device)
    salts = state.sources.salts
    rows = []
    for place, (slot, column, other) in enumerate(lookups):
        wanted = values[place] - salts[column] + salts[other]
        # What was never written was fingerprinted as it lay there.
        hit = (state.fingerprints[:, other] == wanted) & (state.records[:, STEP_WRITTEN] != 0)
        if column == other:
            # Not an assignment by index, for which the host would wait.
            hit.narrow(0, slot, 1).zero_()
        rows.append(torch.stack((hit.any().long(), hit.int().argmax())))
    return torch.stack(rows)


def _group_matches(state: RegionState, lookups: Sequence[tuple[int, int, int]]) -> Tensor:
    """As `_matches`, where all sources of a group have the bytes of one other slot."""
    hits: dict[tuple[int, int], Tensor] = {}
    for slot, source, _ in lookups:
        first = state.sources.column_of(source)
        if (slot, first) not in hits:
            numbers = summed(state, upload([slot], state.records.device)).numbers[0, first : first + PER_GROUP]
            hit = (state.fingerprints[:, first : first + PER_GROUP] == numbers).all(1)
            hit &= state.records[:, STEP_WRITTEN] != 0
            hit.narrow(0, slot, 1).zero_()
            hits[slot, first] = torch.stack((hit.any().long(), hit.int().argmax()))
    return torch.stack([hits[slot, state.sources.column_of(source)] for slot, source, _ in lookups])


def _found_values(state: RegionState, lookups: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """The fingerprints of the present bytes of each lookup's slot and source: int64 ``[lookups]``."""
    slots = upload([slot for slot, _, _ in lookups], device)
    columns = upload([column for _, column, _ in lookups], device)
    return stored_and_found(state, slots)[1].gather(1, columns[:, None])[:, 0]


def _facts(state: RegionState) -> tuple[SourceFacts, ...]:
    return tuple(
        SourceFacts(
            s.name,
            s.layer,
            s.half,
            "" if s.dtype is None else str(s.dtype).removeprefix("torch."),
            s.chunks,
            s.chunk_bytes,
            s.slot_words,
        )
        for s in state.sources
    )
