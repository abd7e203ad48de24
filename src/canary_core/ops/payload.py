"""Records that travel with bytes: for KV kept in host memory, sent over a network, or copied on the device.
`canary_core.records` has the layout of a payload.

`export_records` makes the payload of slots when their bytes leave, `import_records` restores the records on arrival,
and in between `check_payload` compares bytes and payload, on the host and without a GPU, by the same fingerprint
(`fingerprint_bytes`).
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from canary_core.errors import AttachError
from canary_core.ops.fingerprint_keys import PUBLIC, FingerprintKeys, known_keys
from canary_core.ops.sums import PER_GROUP, explained, weights_of
from canary_core.records import (
    CONTENT,
    FREED_BY,
    PAYLOAD_FINGERPRINTS,
    PAYLOAD_RECORD,
    PAYLOAD_STAMP,
    PAYLOAD_VERSION,
    POSITION,
    RECORD_WORDS,
    STATES,
    STEP_FREED,
    STEP_WRITTEN,
    TOKEN,
    WRITER,
    Clock,
    Counter,
    State,
)

if TYPE_CHECKING:
    from canary_core.ops.state import RegionState

BLOCK_WORDS = 1 << 16
"""Words taken at a time by `fingerprint_bytes`, so that the scratch stays in a core's cache."""

_OWNED = int(State.FREED | State.PARKED)
"""The bits of a state for the owner of a slot, independent of content."""

_NONCE = os.urandom(16)
"""Tells this process's payloads from another's."""


class Array(Protocol):
    """A numpy array, without a need for numpy."""

    @property
    def flags(self) -> Any:
        """Says whether the array is ``writeable``."""

    def copy(self) -> Any:
        """The same values in memory of their own."""


@dataclass(frozen=True, slots=True)
class SourceLayout:
    """One fingerprinted source of a payload: ``chunks`` chunks of ``chunk_bytes`` bytes a slot."""

    name: str
    chunks: int
    chunk_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Fingerprinted bytes of one slot."""
        return self.chunks * self.chunk_bytes


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Meaning of a region's payloads, as plain values, picklable for another process.

    ``sources`` are in the order of the fingerprints; ``groups``: of those that share two of them, see `Sums`; empty
    where each has its own. ``origin``, 32 bits, is the exporting Canary: its writer ids and
    steps mean nothing elsewhere. ``keys``: `FingerprintKeys.id`, 0 for the public ones. A payload fits regions whose
    layout has the same ``digest``.
    """

    sources: tuple[SourceLayout, ...]
    origin: int
    keys: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    digest: int = field(init=False)

    def __post_init__(self) -> None:
        text = ";".join(f"{s.name},{s.chunks},{s.chunk_bytes}" for s in self.sources)
        keys = f";keys {self.keys}" if self.keys else ""
        keys += f";groups {self.groups}" if self.groups else ""
        digest = blake2b(f"{PAYLOAD_VERSION};{text}{keys}".encode(), digest_size=4).digest()
        # 31 bits and never 0: a payload of zeros fits nowhere.
        object.__setattr__(self, "digest", int.from_bytes(digest, "little") >> 1 or 1)

    @classmethod
    def of(cls, state: "RegionState") -> "PayloadLayout":
        """The layout of a region's payloads."""
        known = _layouts.get(state)
        if known is None:
            origin = blake2b(_NONCE + f"{os.getpid()},{id(state.shared)}".encode(), digest_size=4).digest()
            sources = tuple(SourceLayout(s.name, s.chunks, s.chunk_bytes) for s in state.sources)
            keys = state.sources.fingerprint_keys.id
            known = _layouts[state] = cls(sources, int.from_bytes(origin, "little"), keys, state.sources.sums.groups)
        return known

    def read(self, payload: Tensor) -> "PayloadRecords":
        """Known facts in the rows of ``payload`` (int64 ``[n, words]``, on any device) about the exported slots. Never
        waits for the device."""
        known, record = _records_of(self, payload)
        word = record[:, POSITION].long()
        written = known & (word & CONTENT == State.WRITTEN)
        return PayloadRecords(known, written, record[:, TOKEN].long(), word // STATES)

    @property
    def words(self) -> int:
        """int64 words of one slot's payload."""
        return PAYLOAD_FINGERPRINTS + (PER_GROUP * len(self.groups) or len(self.sources))

    @property
    def stamp(self) -> int:
        """First word of every payload row of the layout."""
        return self.digest << 32 | self.origin


@dataclass(frozen=True, slots=True, eq=False)
class PayloadRecords:
    """Rows of a payload, read: all ``[n]``, on the payload's device.

    known: bool, whether the row is of the layout; if not, the other fields mean nothing. written: bool, whether the
    slot held a token written by a forward. tokens, positions: int64, the token and its position.
    """

    known: Tensor
    written: Tensor
    tokens: Tensor
    positions: Tensor


_layouts: "WeakKeyDictionary[RegionState, PayloadLayout]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Difference:
    """A slot in host memory whose bytes differ from the recorded ones: row ``row`` of the payload, in ``source``. Where
    several of the sources that share fingerprints have changed, it is not known which, and each counts.

    ``writer`` and ``step_written`` are those of the exporting Canary.
    """

    row: int
    source: str
    stored_value: int
    found_value: int
    token: int
    position: int
    writer: int
    step_written: int


@dataclass(frozen=True, slots=True)
class PayloadCheck:
    """Result of `check_payload`. ``checked`` and ``skipped`` count (row, source) pairs; skipped are pairs with bytes
    unknown, or never written, at the export. ``other_keys``: nothing was compared, since this process has not the keys
    of the payload, see ``CANARY_KEY_FILE``."""

    differences: tuple[Difference, ...]
    checked: int
    skipped: int
    other_keys: bool = False


def fingerprint_bytes(data: Tensor | Array, chunk_bytes: int, column: int, keys: FingerprintKeys = PUBLIC) -> Tensor:
    """The fingerprint of a source's slots with the given bytes, equal to the device's of the same ``keys``: int64
    ``[n]``.

    data: ``[n, ...]``, each row the bytes of one slot, its chunks of ``chunk_bytes`` bytes one after the other; uint8,
    or any dtype for its raw bytes. A numpy array or a tensor, on any device. column: index of the source among the
    region's fingerprinted sources (`PayloadLayout.sources`). Raises `AttachError` if chunks do not divide a row.
    """
    data = _as_bytes(data)
    slots, slot_bytes = data.shape
    if chunk_bytes < 1 or slot_bytes % chunk_bytes or not slot_bytes:
        raise AttachError(f"a slot of {slot_bytes} bytes has no whole number of chunks of {chunk_bytes} bytes")
    chunks, width = slot_bytes // chunk_bytes, -(-chunk_bytes // 4)
    multipliers = keys.words(chunks * width, data.device)
    out = torch.empty(slots, dtype=torch.int64, device=data.device)
    rows = max(BLOCK_WORDS // len(multipliers), 1)
    for first in range(0, slots, rows):
        block = data[first : first + rows].reshape(-1, chunks, chunk_bytes)
        if width * 4 != chunk_bytes:
            block = pad(block, (0, width * 4 - chunk_bytes))
        if block.storage_offset() % 4 or not block.is_contiguous():
            block = block.clone(memory_format=torch.contiguous_format)
        words = block.view(torch.int32).view(-1, len(multipliers)).long() & 0xFFFFFFFF
        out[first : first + rows] = words.mul_(multipliers).sum(1)
    return out + keys.sources(column + 1, data.device)[column]


def check_payload(layout: PayloadLayout, payload: Tensor, data: Mapping[str, Tensor | Array]) -> PayloadCheck:
    """Compares bytes in host memory with the payload exported beside them.

    payload: int64 ``[n, layout.words]``. data: source name → bytes of the same ``n`` slots, in the form of
    `fingerprint_bytes`; any of the layout's sources. Of a longer row only the first bytes are fingerprinted
    (``CANARY_BYTES=partial``). Raises `AttachError` for a source unknown to the layout, or another number of slots.
    """
    payload = payload.cpu()
    if payload.dim() != 2 or payload.shape[1] != layout.words:
        raise AttachError(f"payload must be [n, {layout.words}] for this layout, got {tuple(payload.shape)}")
    columns = {source.name: column for column, source in enumerate(layout.sources)}
    known, record = _records_of(layout, payload)
    written = known & (record[:, POSITION] & CONTENT == State.WRITTEN)
    keys = known_keys(layout.keys)
    found: dict[int, Tensor] = {}
    for name, content in data.items():
        if name not in columns:
            raise AttachError(f"no source {name!r} in this payload; its sources are {', '.join(columns) or 'none'}")
        source = layout.sources[columns[name]]
        bytes_ = _as_bytes(content).cpu()
        if bytes_.shape[0] != len(payload) or bytes_.shape[1] < source.slot_bytes:
            raise AttachError(
                f"{name}: {len(payload)} slots of {source.slot_bytes} bytes are needed, got {tuple(bytes_.shape)}"
            )
        if keys is not None:
            bytes_ = bytes_[:, : source.slot_bytes]
            found[columns[name]] = fingerprint_bytes(bytes_, source.chunk_bytes, columns[name], keys)
    differences: list[Difference] = []
    checked = 0
    for name, column, stored, value in () if keys is None else _judged(layout, payload, found, keys):
        judged = written & (payload[:, PAYLOAD_FINGERPRINTS + column] != 0)
        for row in (judged & (value != stored)).nonzero()[:, 0].tolist():
            fields = record[row].tolist()
            token, position = fields[TOKEN], fields[POSITION] // STATES
            values = int(stored[row]), int(value[row])
            differences.append(Difference(row, name, *values, token, position, fields[WRITER], fields[STEP_WRITTEN]))
        checked += int(judged.sum())
    skipped = len(data) * len(payload) - checked
    return PayloadCheck(tuple(differences), checked, skipped, keys is None)


def _judged(
    layout: PayloadLayout, payload: Tensor, found: Mapping[int, Tensor], keys: FingerprintKeys
) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Of each source in ``found``, by column, name, column of the payload's fingerprints that says whether it is known,
    fingerprints recorded and found, int64 ``[n]``. Sources that share fingerprints are judged together, where all are
    there: where several have changed, all of them have other ones."""
    if not layout.groups:
        for column, value in found.items():
            yield layout.sources[column].name, column, payload[:, PAYLOAD_FINGERPRINTS + column], value
        return
    weights = weights_of(keys, len(layout.sources))
    salts = keys.sources(len(layout.sources) + PER_GROUP * len(layout.groups))
    for number, group in enumerate(layout.groups):
        if not all(column in found for column in group):
            continue
        raw = torch.stack([found[column] - salts[column] for column in group])
        first = PER_GROUP * number
        numbers = (
            payload[:, PAYLOAD_FINGERPRINTS + first :][:, :PER_GROUP] - salts[len(layout.sources) + first :][:PER_GROUP]
        )
        by = raw.sum(0) - numbers[:, 0]
        weighted = (raw * weights[list(group), None]).sum(0) - numbers[:, 1]
        alone, several = explained(by, weighted, weights[list(group)])
        for column, mask in zip(group, alone, strict=True):
            stored = torch.where(several, ~found[column], found[column] - by * mask)
            yield layout.sources[column].name, first, stored, found[column]


def export_records(state: "RegionState", slots: Tensor) -> Tensor:
    """Payload of ``slots`` (integer ``[n]``): int64 ``[n, layout.words]`` on the region's device. Rows of numbers
    beyond the region are zero, imported as unknown. Never waits for the device."""
    slots = slots.long()
    inside = (slots >= 0) & (slots < state.region.slots)
    slot = torch.where(inside, slots, 0)
    stamp = torch.full_like(slot, PayloadLayout.of(state).stamp)
    fingerprints = torch.where(state.sources.columns_present(slot), state.fingerprints[slot], 0)
    payload = torch.cat((stamp[:, None], state.records.view(torch.int64)[slot], fingerprints), dim=1)
    return payload * inside[:, None]


def import_records(state: "RegionState", slots: Tensor, payload: Tensor, writer: int = -1) -> None:
    """Sets the records of ``slots`` (integer ``[n]``, each at most once) from ``payload`` (``[n, layout.words]``, on
    the region's device). Numbers beyond the region are left out. Never waits for the device.

    A slot becomes *unknown* where the payload is of another layout, or has other keys, which counts as `UNFIT_ROWS`.
    Bytes without a fingerprint in the payload are not compared, and the rest of the record holds. Writer and step are
    kept from the same Canary only; otherwise the writer is ``writer``, the step now. The bits for freed and parked stay
    the slot's own.
    """
    layout = PayloadLayout.of(state)
    slots = slots.long()
    if not len(slots):
        return
    stamped = payload[:, PAYLOAD_STAMP] != 0 if payload.dim() == 2 and payload.shape[1] else torch.zeros_like(slots) > 0
    if payload.dim() != 2 or payload.shape[1] != layout.words:
        payload = state.fingerprints.new_zeros(len(slots), layout.words)
    entry, slot, anything = state.entries(slots)
    payload = payload[entry]
    old = state.records[slot]
    known, new = _records_of(layout, payload)
    once = anything & (entry == torch.arange(len(slots), device=slots.device))
    state.shared.counters[Counter.UNFIT_ROWS] += (stamped & ~known & once).sum()
    own = known & (payload[:, PAYLOAD_STAMP] & 0xFFFFFFFF == layout.origin)
    fingerprints = torch.where(known[:, None], payload[:, PAYLOAD_FINGERPRINTS:], 0)
    content = torch.where(known, new[:, POSITION] & CONTENT, int(State.UNKNOWN))
    content = torch.where(content == State.WRITTEN, content + int(State.ARRIVED), content)
    owned = old[:, POSITION] & _OWNED
    new = torch.where(known[:, None], new, 0)
    new[:, POSITION] = new[:, POSITION] // STATES * STATES + content + owned
    new[:, WRITER] = torch.where(own, new[:, WRITER], writer)
    # 0 would say that nothing was ever written.
    new[:, STEP_WRITTEN] = torch.where(own, new[:, STEP_WRITTEN], state.shared.clock[Clock.NEXT].clamp(min=1).int())
    for word in (STEP_FREED, FREED_BY):
        new[:, word] = torch.where(owned != 0, old[:, word], 0)
    state.records[slot] = torch.where(anything, new, old)
    state.fingerprints[slot] = torch.where(anything, fingerprints, state.fingerprints[slot])


def _records_of(layout: PayloadLayout, payload: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each row is of the layout, bool ``[n]``, and the records in the rows, int32 ``[n, RECORD_WORDS]``."""
    known = payload[:, PAYLOAD_STAMP] >> 32 == layout.digest
    record = payload[:, PAYLOAD_RECORD:PAYLOAD_FINGERPRINTS].contiguous().view(torch.int32)
    return known, record.view(-1, RECORD_WORDS)


def _as_bytes(data: Tensor | Array) -> Tensor:
    """uint8 ``[n, bytes of a row]``."""
    if not isinstance(data, Tensor):
        # Torch warns of memory that it can't write, such as a received message's.
        data = torch.from_numpy(data if data.flags.writeable else data.copy())
    data = data.flatten(1)
    return data if data.dtype is torch.uint8 else data.contiguous().view(torch.uint8)
