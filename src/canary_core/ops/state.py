"""`RegionState`: all device memory that Canary keeps for one region, allocated once; `Shared`: what regions share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.config import CanaryConfig
from canary_core.errors import AttachError
from canary_core.ops import hashing
from canary_core.records import (
    ALL_TILES,
    CHAINS,
    CHECK_TILE,
    CLOCK_WORDS,
    COUNTERS,
    CURSOR_WORDS,
    DESCRIPTOR_WORDS,
    LOST_WRITE_BYTES,
    PLAN_WORDS,
    READ_TILE,
    RECORD_WORDS,
    ROW_WORDS,
    Clock,
    Cursor,
)
from canary_core.region import PARTIAL_BYTES, KVSource, Region, RegionKind, Role

FIRST_ROWS = 256
FIRST_TOKENS = 8192
"""Capacity of a region's scratch before a batch asks for more."""
NARROW_WORDS = 16
"""Most words a slot of a source that another one takes along: they are read at once."""

# Exponent bits, lowest exponent bit and the bit above, of one 32-bit word full of floats. For e4m3fn only the mantissa
# full of ones is NaN, so its seven low bits count as exponent. Formats with NaN at -0 (fnuz) have no such pattern.
_FLOAT_BITS: dict[torch.dtype, tuple[int, int, int]] = {
    torch.float32: (0x7F800000, 0x00800000, 0x80000000),
    torch.bfloat16: (0x7F807F80, 0x00800080, 0x80008000),
    torch.float16: (0x7C007C00, 0x04000400, 0x80008000),
    torch.float8_e4m3fn: (0x7F7F7F7F, 0x01010101, 0x80808080),
    torch.float8_e5m2: (0x7C7C7C7C, 0x04040404, 0x80808080),
}


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Device memory shared by the regions of one Canary.

    counters: int64 ``[COUNTERS]``. clock: int64 ``[CLOCK_WORDS]``. ring: int64 ``[ring rows, ROW_WORDS]``.
    """

    counters: Tensor
    clock: Tensor
    ring: Tensor

    @classmethod
    def allocate(cls, config: CanaryConfig, device: torch.device) -> "Shared":
        """Zeroed memory on ``device``."""
        return cls(
            counters=torch.zeros(COUNTERS, dtype=torch.int64, device=device),
            clock=torch.zeros(CLOCK_WORDS, dtype=torch.int64, device=device),
            ring=torch.zeros(config.ring_rows, ROW_WORDS, dtype=torch.int64, device=device),
        )


class RegionState:
    """One region's device memory. Tensors keep their addresses for life, so captured graphs stay
    valid.

    records: int32 ``[slots, 8]``. fingerprints: int64 ``[slots, sources]``, 0 for not known. claims: int64 ``[slots]``,
    the last step and token index + 1 that claimed a slot for writing (``step * 2**32 + index + 1``). chains: see
    `CHAINS`. cursors: see `Cursor`. descriptors: int64 ``[sources, DESCRIPTOR_WORDS]``. keys, salts: see `hashing`.
    Scratch of one forward, grown by `require_capacity`: heads, int64 ``[rows]``, each row's prefix hash before its new
    tokens, 0 for unknown; plan, int64 ``[tokens, PLAN_WORDS]``.
    """

    def __init__(self, region: Region, index: int, shared: Shared, config: CanaryConfig) -> None:
        self.region = region
        self.index = index
        self.shared = shared
        self.sources = guarded_sources(region.sources, config.bytes)
        self.non_finite = config.non_finite
        device = region.device
        self.records = torch.zeros(region.slots, RECORD_WORDS, dtype=torch.int32, device=device)
        self.fingerprints = torch.zeros(region.slots, len(self.sources), dtype=torch.int64, device=device)
        self.claims = torch.zeros(region.slots, dtype=torch.int64, device=device)
        self.heads = torch.zeros(FIRST_ROWS, dtype=torch.int64, device=device)
        self.plan = torch.zeros(FIRST_TOKENS, PLAN_WORDS, dtype=torch.int64, device=device)
        self._outgrown: list[Tensor] = []
        self.chains = torch.zeros(CHAINS, 2, dtype=torch.int64, device=device)
        self.cursors = torch.zeros(CURSOR_WORDS, dtype=torch.int64, device=device)
        self.keys = hashing.keys(max((s.slot_words for s in self.sources), default=1), device)
        self.salts = hashing.salts(max(len(self.sources), 1), device)
        self.descriptors = torch.zeros(len(self.sources), DESCRIPTOR_WORDS, dtype=torch.int64, device=device)
        self.groups = source_groups(self.sources, device)
        self._describe()
        # What the back ends remember, until a tensor of this region moves.
        self.arguments: dict[Any, Any] = {}
        read_tiles = -(-config.read_check // READ_TILE)
        if config.read_check < 0 or region.kind in (RegionKind.STATE, RegionKind.RING):
            read_tiles = ALL_TILES
        self.reads = bool(self.sources and read_tiles)
        self.cursors[Cursor.READ_TILES] = read_tiles if self.sources else 0
        check_tiles = -(-config.check_budget // CHECK_TILE) if config.check_budget else ALL_TILES
        self.cursors[Cursor.CHECK_TILES] = check_tiles

    def require_capacity(self, batch: BatchView) -> None:
        """Grows the scratch to the batch's rows and tokens. Rare: sizes double. Outgrown scratch is kept, because a
        captured graph may still use it."""
        if batch.rows > self.heads.shape[0]:
            self.arguments.clear()
            self._outgrown.append(self.heads)
            self.heads = self.heads.new_zeros(1 << (batch.rows - 1).bit_length())
        if batch.tokens > self.plan.shape[0]:
            self.arguments.clear()
            self._outgrown.append(self.plan)
            self.plan = self.plan.new_zeros(1 << (batch.tokens - 1).bit_length(), PLAN_WORDS)

    def __copy__(self) -> "RegionState":
        """The same tensors, to be replaced one by one: launches must not remember the original's."""
        other = RegionState.__new__(RegionState)
        other.__dict__.update(self.__dict__, arguments={})
        return other

    def forget_written(self) -> None:
        """After a forward and before `record`, instead of `fingerprint`: what bytes the written slots have now is not
        known. Passes over all slots' fingerprints, so it is meant for regions of few slots. May be captured."""
        written = self.claims >> 32 == self.shared.clock[Clock.NEXT]
        self.fingerprints.masked_fill_(written[:, None], 0)

    @cached_property
    def slot_bytes(self) -> int:
        """Fingerprinted bytes of one slot."""
        return sum(s.slot_bytes for s in self.sources)

    @property
    def pool_bytes(self) -> int:
        """Fingerprinted bytes of all slots: what one round of the scrub reads."""
        return self.region.slots * self.slot_bytes

    @property
    def memory_bytes(self) -> int:
        """Device memory of ours for this region."""
        tensors = (
            self.records, self.fingerprints, self.claims, self.chains, self.cursors, self.keys, self.salts,
            self.descriptors, self.heads, self.plan, *self._outgrown,
        )  # fmt: skip
        return sum(t.numel() * t.element_size() for t in tensors)

    def rebind(self, sources: Sequence[KVSource], config: CanaryConfig) -> None:
        """New addresses for the same sources; copies the descriptors to the device. Raises `AttachError` if they
        differ in more than tensor, strides and presence."""
        new = guarded_sources(sources, config.bytes)
        for old, fresh in zip(self.sources, new, strict=len(new) == len(self.sources)):
            if (old.name, old.slot_words, old.page_size) != (fresh.name, fresh.slot_words, fresh.page_size):
                raise AttachError(
                    f"region {self.region.name!r}: rebind must keep name, size and page size of {old.name}, got {fresh}"
                )
            fresh.require_slots(self.region.slots)
        if len(new) != len(self.sources):
            raise AttachError(
                f"region {self.region.name!r}: rebind needs all {len(self.sources)} sources, got {len(new)}"
            )
        if [_shape(s) for s in new] != [_shape(s) for s in self.sources]:
            self.arguments.clear()
            self.groups = source_groups(new, self.records.device)
        self.sources = new
        self._describe()

    def _describe(self) -> None:
        rows = [descriptor(s, self.non_finite) for s in self.sources]
        if rows:
            self.descriptors.copy_(torch.tensor(rows, dtype=torch.int64))


class SourceShape(NamedTuple):
    """What of a source is a compile-time constant in a kernel."""

    page_size: int
    chunks: int
    chunk_bytes: int
    alignment: int

    @property
    def words(self) -> int:
        """Words of one slot, each chunk's last one filled up."""
        return self.chunks * -(-self.chunk_bytes // 4)


class SourceGroup(NamedTuple):
    """Sources that one kernel launch takes together: ``columns[i, j]`` is the index, among the region's sources, of the
    i-th one of shape ``shapes[j]``; int32 ``[n, shapes]`` on the device.

    A program takes a row of them: one source, or one and a narrow strip that goes with it, such as its scales.
    """

    shapes: tuple[SourceShape, ...]
    columns: Tensor


def source_groups(sources: Sequence[KVSource], device: torch.device) -> tuple[SourceGroup, ...]:
    """The sources by shape, in order of first appearance; a shape takes the next one along that is narrow beside it and
    has as many sources."""
    by_shape: dict[SourceShape, list[int]] = {}
    for index, source in enumerate(sources):
        by_shape.setdefault(_shape(source), []).append(index)
    groups = []
    while by_shape:
        shape, indices = next(iter(by_shape.items()))
        most = min(NARROW_WORDS, shape.words // 4)
        strip = next((s for s, i in by_shape.items() if s.words <= most and len(i) == len(indices)), None)
        shapes = (shape,) if strip is None else (shape, strip)
        columns = torch.tensor([by_shape.pop(s) for s in shapes], dtype=torch.int32, device=device)
        groups.append(SourceGroup(shapes, columns.T.contiguous()))
    return tuple(groups)


def _shape(source: KVSource) -> SourceShape:
    return SourceShape(source.page_size, source.chunks, source.chunk_bytes, source.alignment)


def guarded_sources(sources: Sequence[KVSource], share: str) -> tuple[KVSource, ...]:
    """The sources as `CANARY_BYTES` wants them fingerprinted."""
    if share == "off":
        return ()
    if share == "partial":
        return tuple(s.first_bytes(PARTIAL_BYTES) for s in sources)
    return tuple(sources)


def descriptor(source: KVSource, non_finite: bool) -> list[int]:
    """A source as `Descriptor` words."""
    exponent, increment, carry = _FLOAT_BITS.get(source.dtype, (0, 0, 0)) if source.dtype and non_finite else (0, 0, 0)
    present = source.page_size if source.present is None else source.present
    sure = source.role is Role.DATA and source.slot_bytes >= LOST_WRITE_BYTES
    return [
        source.address, source.page_size, source.page_stride_bytes, source.slot_stride_bytes, source.chunks,
        source.chunk_stride_bytes, source.chunk_bytes, present, int(sure), exponent, increment, carry,
    ]  # fmt: skip
