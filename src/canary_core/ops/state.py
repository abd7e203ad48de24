"""`RegionState`: all device memory kept for one region, allocated once; `Shared`: memory common to the regions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.config import CanaryConfig
from canary_core.ops.launches import LaunchCache
from canary_core.ops.samples import FIRST_ROWS, Samples
from canary_core.ops.sources import SourceTable
from canary_core.records import (
    ALL_TILES,
    CHAINS,
    CHECK_TILE,
    CLAIM_TOKEN_BITS,
    CLOCK_WORDS,
    COUNTERS,
    CURSOR_WORDS,
    GAUGES,
    HISTORY,
    KIND_ROWS,
    PLAN_WORDS,
    READ_TILE,
    RECORD_WORDS,
    ROW_WORDS,
    Clock,
    Counter,
    Cursor,
)
from canary_core.region import KVSource, Placement, Region, RegionKind

FIRST_TOKENS = 8192
"""Capacity of a region's scratch before a batch asks for more, beside `FIRST_ROWS`."""

SLOT_BYTES = 4 * RECORD_WORDS + 8
"""Of a slot, beside fingerprints and history: record and claim."""

BEHIND_RING = Counter.FIRST * KIND_ROWS
"""Rows behind a ring."""

LEAST_LISTED, LISTED_SHARE = 1 << 18, 16
"""A scrub compares at most one in so many slots, or so many, if more. A budget that wants more gets round in 16."""

HISTORY_SHARE = 3
"""Histories take at most one in so many bytes of those that ``CANARY_MEMORY`` allows."""

HISTORY_EXACT_SHARE = 100
"""Where it sets no limit, one in so many bytes of the region's slots."""

HISTORY_FREE_BYTES = 16 << 20
"""Or this much, if more: too little to matter, however small the slots are."""


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Device memory shared by the regions of one Canary.

    counters: int64 ``[COUNTERS + regions * GAUGES]``. clock: int64 ``[CLOCK_WORDS]``. ring: int64 ``[ring_rows + kinds
    * KIND_ROWS, ROW_WORDS]``.
    """

    counters: Tensor
    clock: Tensor
    ring: Tensor

    @classmethod
    def allocate(cls, config: CanaryConfig, device: torch.device, regions: int = 1) -> "Shared":
        """Zeroed memory on ``device``."""
        return cls(
            counters=torch.zeros(COUNTERS + regions * GAUGES, dtype=torch.int64, device=device),
            clock=torch.zeros(CLOCK_WORDS, dtype=torch.int64, device=device),
            ring=torch.zeros(config.ring_rows + BEHIND_RING, ROW_WORDS, dtype=torch.int64, device=device),
        )

    @property
    def ring_rows(self) -> int:
        """Rows of the ring itself, without those of each kind behind."""
        return self.ring.shape[0] - BEHIND_RING


class Scratch:
    """Memory passed between the ops of one forward in one region: filled by `check`, read by the ops after the forward.

    claims: int64 ``[slots]``, the last claim of each slot for writing, see `claim`. heads: int64 ``[rows]``, each row's
    prefix hash before its new tokens, 0 for unknown. plan: int64 ``[tokens, PLAN_WORDS]``.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.claims = torch.zeros(slots, dtype=torch.int64, device=device)
        self.heads = torch.zeros(FIRST_ROWS, dtype=torch.int64, device=device)
        self.plan = torch.zeros(FIRST_TOKENS, PLAN_WORDS, dtype=torch.int64, device=device)
        self._rows, self._tokens = FIRST_ROWS, FIRST_TOKENS
        self._outgrown: list[Tensor] = []

    def grow(self, batch: BatchView) -> bool:
        """Makes room for the batch's rows and tokens; returns whether a tensor was replaced. Rare: sizes double.
        Outgrown tensors are kept, because a captured graph may still use them."""
        grown = False
        if batch.rows > self._rows:
            self._outgrown.append(self.heads)
            self._rows = 1 << (batch.rows - 1).bit_length()
            self.heads = self.heads.new_zeros(self._rows)
            grown = True
        if batch.tokens > self._tokens:
            self._outgrown.append(self.plan)
            self._tokens = 1 << (batch.tokens - 1).bit_length()
            self.plan = self.plan.new_zeros(self._tokens, PLAN_WORDS)
            grown = True
        return grown

    @staticmethod
    def claim(step: Tensor, token: Tensor) -> Tensor:
        """The entry of `claims` for a slot written by token number ``token`` of forward ``step``, see
        `CLAIM_TOKEN_BITS`."""
        return (step << CLAIM_TOKEN_BITS) + token + 1

    @staticmethod
    def claiming_token(claims: Tensor) -> Tensor:
        """Token number of each of ``claims`` within its forward."""
        return (claims & ((1 << CLAIM_TOKEN_BITS) - 1)) - 1

    @staticmethod
    def claiming_step(claims: Tensor) -> Tensor:
        """Forward of each of ``claims``."""
        return claims >> CLAIM_TOKEN_BITS

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors ever allocated."""
        return self.claims, self.heads, self.plan, *self._outgrown

    @property
    def memory_bytes(self) -> int:
        """Bytes of all tensors ever allocated."""
        return sum(t.nbytes for t in self.tensors)


class RegionState:
    """One region's device memory. Tensors keep their addresses for life, so captured graphs stay valid.

    records: int32 ``[slots, 8]``. fingerprints: int64 ``[slots, sources.columns]``, 0 for unknown. chains: see
    `CHAINS`. cursors: see `Cursor`.
    histories: int64 ``[slots + 1, HISTORY]``, see `Happened`; None where they would be too large beside the slots.
    listed: int32 ``[2, listed_slots]``, slots to compare by a scrub, ``listed_slots`` at most, see `ScrubWord.LIST`.
    sources: the fingerprinted sources. scratch: memory between the ops of one forward. launches: the back ends' cache.
    reads: whether forwards compare bytes before reading them. samples: the sampled tokens, None where not compared.
    stores: int64 ``[slots, sources]``, fingerprints of bytes stored so far by the running forward, 0 for unknown; empty
    without ``CANARY_STORE_CHECK``.
    """

    def __init__(self, region: Region, index: int, shared: Shared, config: CanaryConfig) -> None:
        self.region = region
        self.index = index
        self.shared = shared
        device = region.device
        remembers = _remembers(region, config)
        self.listed_slots = min(region.slots, max(LEAST_LISTED, -(-region.slots // LISTED_SHARE)))
        self.listed = torch.zeros(2, self.listed_slots, dtype=torch.int32, device=device)
        others = SLOT_BYTES + 8 * HISTORY * remembers + self.listed.nbytes / region.slots
        self.sources = SourceTable(region, config, others)
        self.records = torch.zeros(region.slots, RECORD_WORDS, dtype=torch.int32, device=device)
        self._fingerprinted = len(self.sources) > 0
        self.fingerprints = torch.zeros(region.slots, self.sources.columns, dtype=torch.int64, device=device)
        self.chains = torch.zeros(CHAINS, 2, dtype=torch.int64, device=device)
        self.cursors = torch.zeros(CURSOR_WORDS, dtype=torch.int64, device=device)
        self.histories: Tensor | None = None
        if remembers:
            self.histories = torch.zeros(region.slots + 1, HISTORY, dtype=torch.int64, device=device)
        self.scratch = Scratch(region.slots, device)
        self.launches = LaunchCache()
        self.samples: Samples | None = None
        # Layers that share a fingerprint are stored one after the other.
        own = 0 if self.sources.sums else len(self.sources)
        looked_at = config.store_check and region.kind in (RegionKind.FULL, RegionKind.WINDOW) and own
        self.stores = torch.zeros_like(self.fingerprints) if looked_at else self.fingerprints.new_zeros(0, 0)
        self.repairs = config.repair and own > 0
        """Whether flipped words are put back."""
        from canary_core.recomputer import may_recompute

        self.recomputes = may_recompute(config) and region.kind in (RegionKind.FULL, RegionKind.WINDOW)
        """Whether requests may be computed again, and their KV compared."""
        read_tiles = -(-config.read_check // READ_TILE)
        if config.read_check < 0 or region.kind in (RegionKind.STATE, RegionKind.RING):
            read_tiles = ALL_TILES
        self.reads = bool(self.sources and read_tiles)
        self.judged_nulls = _judged_nulls(region)
        """How many null slots are looked at for NaN and infinity, from the first one on."""
        # Not assignments: those copy the number from the host and wait for the device.
        self.cursors[Cursor.READ_TILES].fill_(read_tiles if self.sources else 0)
        check_tiles = -(-config.check_budget // CHECK_TILE) if config.check_budget else ALL_TILES
        self.cursors[Cursor.CHECK_TILES].fill_(check_tiles)

    def require_capacity(self, batch: BatchView) -> None:
        """Before a forward's ops: makes room for the batch's rows and tokens, see `Scratch.grow`."""
        grown = self.scratch.grow(batch)
        if self.samples is not None:
            grown |= self.samples.grow(batch)
        if grown:
            self.launches.clear()

    def follow_sampler(self) -> None:
        """Compares tokens with the sampler's from the next forward on. Never captured."""
        if self.samples is None:
            self.samples = Samples(self.records.device)
            self.launches.clear()

    def forget_written(self) -> None:
        """After a forward and before `record`, instead of `fingerprint`: makes the written slots' bytes unknown. Passes
        over all slots' fingerprints, so meant for regions of few slots. May be captured."""
        written = self.scratch.claiming_step(self.scratch.claims) == self.shared.clock[Clock.NEXT]
        self.fingerprints.masked_fill_(written[:, None], 0)

    def entries(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``slots`` (int64 ``[n]``, n at least 1) without numbers beyond the region, and without a wait for the device:
        the first valid slot takes their place, since the same value written twice does no harm. Returns index and slot
        of each, and whether any is valid; if not, the slots must be left alone."""
        inside = (slots >= 0) & (slots < self.region.slots)
        entry = torch.where(inside, torch.arange(len(slots), device=slots.device), inside.int().argmax())
        return entry, slots[entry].clamp(0, self.region.slots - 1), inside.any()

    def release(self) -> None:
        """Frees all memory that grows with the region, whoever still holds the tensors: afterwards no op may be
        launched here, and no graph may hold one."""
        histories = () if self.histories is None else (self.histories,)
        for tensor in (self.records, self.fingerprints, self.listed, self.stores, *histories, *self.scratch.tensors):
            tensor.untyped_storage().resize_(0)

    def forget_nulls(self) -> None:
        """Makes the null slots' bytes unknown: the next look counts as the first."""
        nulls = self.region.null_range
        self.fingerprints[nulls.start : nulls.stop].zero_()

    @property
    def readable(self) -> bool:
        """Whether there are bytes to read: not where none are fingerprinted, nor after `SourceTable.let_go`."""
        return self._fingerprinted and not self.sources.gone

    @property
    def pool_bytes(self) -> int:
        """Fingerprinted bytes of all slots: the bytes read by a round of the scrub if all are written."""
        return self.region.slots * self.sources.slot_bytes

    @property
    def memory_bytes(self) -> int:
        """Canary's device memory for the region, in bytes."""
        tensors = (self.records, self.fingerprints, self.chains, self.cursors, self.listed, self.stores)
        own = sum(t.nbytes for t in tensors)
        own += 0 if self.histories is None else self.histories.nbytes
        sampled = 0 if self.samples is None else self.samples.memory_bytes
        return own + self.sources.memory_bytes + self.scratch.memory_bytes + sampled

    def rebind(self, sources: Sequence[KVSource]) -> None:
        """New addresses for the same sources, see `SourceTable.rebind`. Raises `AttachError`. Never captured."""
        if self.sources.rebind(sources):
            self.launches.clear()

    def rebind_alike(self, tensors: Sequence[Tensor], places: Sequence[Placement]) -> bool:
        """As `rebind`, see `SourceTable.rebind_alike`: the launches stay the same."""
        return self.sources.rebind_alike(tensors, places)


def _remembers(region: Region, config: CanaryConfig) -> bool:
    """Whether slots have histories."""
    share = 1 / HISTORY_EXACT_SHARE if config.memory.share is None else config.memory.share / HISTORY_SHARE
    return 8 * HISTORY * (region.slots + 1) <= max(region.pool_bytes * share, HISTORY_FREE_BYTES)


def _judged_nulls(region: Region) -> int:
    """Number of null slots that attention may read. Writes of padded rows to a state, a ring or a compressed pool are
    read by nobody else."""
    if region.kind not in (RegionKind.FULL, RegionKind.WINDOW):
        return 0
    return len(region.null_range) if region.null_reads is None else region.null_reads


TOKEN_KINDS = (RegionKind.FULL, RegionKind.WINDOW)
"""Kinds of regions with one slot for each token, written once, in order of preference."""


def token_region(states: Mapping[str, RegionState]) -> RegionState | None:
    """The region in which forwards are compared token by token; None where there is none."""
    fit = [s for s in states.values() if s.region.kind in TOKEN_KINDS and s.region.tokens_per_slot == 1]
    return min(fit, key=lambda state: TOKEN_KINDS.index(state.region.kind), default=None)
