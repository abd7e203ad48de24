"""A forward as seen by a fault (`Scene`), and a fault's traces (`Injection`)."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan
from canary_core.ops.torch.sums import stored_and_found
from canary_core.records import POSITION, UNPARKED, Clock, Kind, State, Status
from canary_core.region import KVSource, Role
from canary_core.violation import Violation

if TYPE_CHECKING:
    from canary_core.config.faults import FaultSpec
    from canary_core.guard.canary import Canary

LOOKED = 64
"""Slots drawn by a fault, one of which must be intact."""


@dataclass(frozen=True, slots=True)
class Injection:
    """Damage done, and the form of its finding.

    ``slots`` have wrong bytes or misread entries (empty: found by position), ``positions`` are the affected ones of the
    request, ``source`` is None for all of the region. ``step`` is the forward, counted from 1.
    """

    fault: str
    region: str
    step: int
    kinds: tuple[Kind, ...]
    slots: tuple[int, ...] = ()
    source: str | None = None
    positions: tuple[int, ...] = ()
    request: str | None = None

    def explains(self, violation: Violation) -> bool:
        """Whether ``violation`` names this very fault, neither a consequence nor another fault. A finding about
        anything but bytes must come in the same forward, since the fault is gone afterwards."""
        in_time = violation.step >= self.step if Kind.BYTES in self.kinds else violation.step == self.step
        return (
            in_time
            and violation.kind in self.kinds
            and violation.region == self.region
            and self.source in (None, violation.source)
            and (not self.slots or violation.slot in self.slots)
            and (not self.positions or violation.position in self.positions)
            and self.request in (None, violation.request)
        )

    def fields(self) -> dict[str, object]:
        """The known fields as plain values, for an event or JSON; ``slot`` and ``position`` are the first ones."""
        out: dict[str, object] = {"fault": self.fault, "region": self.region, "step": self.step}
        if self.slots:
            out |= {"slot": self.slots[0], "slots": list(self.slots)}
        if self.positions:
            out["position"] = self.positions[0]
        for name in ("source", "request"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        return out


@dataclass(slots=True)
class Armed:
    """A spec with its random stream and its progress."""

    spec: "FaultSpec"
    random: random.Random
    before_check: bool
    injected: int = 0
    tries: int = 0
    seen: set[object] = field(default_factory=set)
    """Damage done before, whose repetition would be reported as a repeat only."""
    _drawn: bool = False

    def due(self, forward: int) -> bool:
        """Whether to inject in this forward; once drawn, a fault stays due until done."""
        if forward <= self.spec.warmup or (self.spec.count and self.injected >= self.spec.count):
            return False
        self._drawn = self._drawn or self.random.random() < self.spec.probability
        return self._drawn

    def done(self) -> None:
        """The fault was injected."""
        self._drawn = False
        self.injected += 1


@dataclass(frozen=True, slots=True)
class Pending:
    """Damage to undo after the forward; ``lasting``: also if the forward never ended."""

    canary: "Canary"
    restore: Callable[[], None]
    lasting: bool


@dataclass(eq=False)
class Scene:
    """One forward in one region, for a fault. Masks are bool ``[slots]``."""

    canary: "Canary"
    batch: BatchView
    name: str
    armed: Armed
    pending: list[Pending] = field(default_factory=list)

    @property
    def state(self) -> RegionState:
        """Canary's memory of the region."""
        return self.canary.states[self.name]

    @property
    def table(self) -> SlotTable:
        """The engine's table of the region."""
        return self.batch.tables[self.name]

    @property
    def random(self) -> random.Random:
        """The fault's own stream."""
        return self.armed.random

    @cached_property
    def step(self) -> int:
        """The forward's number: its check counts it, so before the check it is the one after the last."""
        clock = self.state.shared.clock.tolist()
        return int(clock[Clock.STEP] + 1 if self.armed.before_check else clock[Clock.NEXT])

    @cached_property
    def rows(self) -> plan.Rows:
        """The forward's ranges."""
        return plan.rows(self.state.region, self.batch, self.table)

    @cached_property
    def reads(self) -> plan.Places:
        """All places read by the forward."""
        return plan.expand(self.rows.read_first, self.rows.prefix)

    @cached_property
    def writes(self) -> plan.Places:
        """All places stored by the forward."""
        return plan.stored(self.state.region, self.rows)

    @cached_property
    def write_slots(self) -> tuple[Tensor, Tensor]:
        """Slot and status of each of `writes`."""
        index = self.rows.token(self.writes)
        return plan.write_slots(self.state.region, self.table, self.writes, index)

    @cached_property
    def read_mask(self) -> Tensor:
        """Slots read by the forward."""
        return self._mask(*plan.lookup(self.state.region, self.table, self.reads))

    @cached_property
    def write_mask(self) -> Tensor:
        """Slots written by the forward."""
        return self._mask(*self.write_slots)

    @cached_property
    def sound(self) -> Tensor:
        """Slots with recorded content and known bytes."""
        records = self.state.records
        mask = records[:, POSITION] & UNPARKED == State.WRITTEN
        if self.state.sources:
            mask &= (self.state.fingerprints != 0).any(1)
        null = self.state.region.null_range
        mask[null.start : null.stop] = False
        return mask

    def source(self, *roles: Role) -> KVSource | None:
        """One of the guarded sources aimed at by the fault, at random; None if there is none."""
        wanted = self.armed.spec.source
        fit = [s for s in self.state.sources if (s.name == wanted if wanted else not roles or s.role in roles)]
        return self.random.choice(fit) if fit else None

    def pick(self, mask: Tensor) -> int | None:
        """One slot of ``mask`` at random."""
        slots = mask.nonzero()[:, 0]
        return int(slots[self.random.randrange(len(slots))]) if len(slots) else None

    def pick_intact(self, mask: Tensor, source: KVSource) -> int | None:
        """One slot of ``mask`` at random with known and intact bytes in ``source``: damage to an already broken slot
        could repair it."""
        column = next(i for i, s in enumerate(self.state.sources) if s.name == source.name)
        known = self.state.fingerprints[:, self.state.sources.column_of(column)] != 0
        slots = (mask & known).nonzero()[:, 0]
        drawn = self.random.sample(range(len(slots)), min(len(slots), LOOKED))
        slots = slots[torch.tensor(drawn, dtype=torch.int64, device=slots.device)]
        slots = slots[~self.broken(slots)[:, column]]
        return int(slots[0]) if len(slots) else None

    def broken(self, slots: Tensor) -> Tensor:
        """Whether each of ``slots`` (int64 ``[n]``) has other bytes than fingerprinted: bool ``[n, sources]``."""
        stored, found = stored_and_found(self.state, slots)
        return (stored != 0) & (found != stored)

    def injection(self, kinds: tuple[Kind, ...], **about: object) -> Injection:
        """An `Injection` of this fault, now and here."""
        return Injection(self.armed.spec.fault, self.name, self.step, kinds, **about)  # type: ignore[arg-type]

    def request(self, row: int) -> str | None:
        """Name of the request in a batch row."""
        return self.canary.writers.name(int(self.batch.writers[row]))

    def _mask(self, slot: Tensor, status: Tensor) -> Tensor:
        mask = torch.zeros(self.state.region.slots, dtype=torch.bool, device=slot.device)
        mask[slot[status == Status.OK]] = True
        return mask


def read_bytes(source: KVSource, slots: Tensor) -> Tensor:
    """The bytes of ``slots`` (int64 ``[n]``): uint8 ``[n, source.slot_bytes]``."""
    flat, index = _places_of(source, slots)
    return flat[index]


def write_bytes(source: KVSource, slots: Tensor, content: Tensor) -> None:
    """Overwrites the bytes of ``slots`` with ``content``, in the form of `read_bytes`."""
    flat, index = _places_of(source, slots)
    flat[index] = content


def _places_of(source: KVSource, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The source's whole storage as bytes, and the index there of each byte of each slot."""
    storage = source.tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=slots.device).set_(storage, 0, (storage.nbytes(),), (1,))
    start = source.address - storage.data_ptr()
    page, inside = slots // source.page_size, slots % source.page_size
    first = start + page * source.page_stride_bytes + inside * source.slot_stride_bytes
    chunk = torch.arange(source.chunks, device=slots.device) * source.chunk_stride_bytes
    byte = torch.arange(source.chunk_bytes, device=slots.device)
    index = first[:, None, None] + chunk[:, None] + byte
    return flat, index.view(len(slots), source.slot_bytes)
