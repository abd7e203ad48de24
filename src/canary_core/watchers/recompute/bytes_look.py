"""`BytesLook`: the bytes of a request's slots, on their way to be a `ComparedBytes`."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from canary_core.ops.backends import choose
from canary_core.ops.launches import LaunchCache
from canary_core.ops.state import RegionState, Shared
from canary_core.recomputer import CachedRequest
from canary_core.records import Counter, Kind, Row
from canary_core.runtime.host_copy import HostCopy
from canary_core.watchers.recompute.compared import Compared
from canary_core.watchers.recompute.compared_bytes import ComparedBytes
from canary_core.watchers.recompute.state_rows import holds_states


class SlotChecks(Protocol):
    """The part of `SlotEvents` used here."""

    def check(self, region: str, slots: Tensor) -> None:
        """Compares the bytes of ``slots`` with their fingerprints."""


class BytesHost(Compared, Protocol):
    """The part of `Canary` used here."""

    @property
    def slots(self) -> SlotChecks:
        """Comparison of bytes beside forwards."""


@dataclass(frozen=True, slots=True, eq=False)
class _RegionLook:
    state: RegionState
    copy: HostCopy

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Counters, rows of the ring, and the slot of each position."""
        self.copy.wait()
        counters, ring, slots = self.copy.tensors
        return counters, ring[ring[:, Row.SEQUENCE] > 0], slots


class BytesLook:
    """Compares all bytes of a request but recurrent states: a difference is a ``bytes`` finding, as by
    `SlotEvents.check`, and the answer is on its way to the host. On the stream of the forwards, between these."""

    def __init__(self, canary: BytesHost, cached: CachedRequest) -> None:
        self._begun: list[_RegionLook] = []
        for name, slots in cached.slots.items():
            state = canary.states[name]
            if holds_states(state.region):
                continue
            held = slots[slots >= 0]
            canary.slots.check(name, held)
            if state.readable:
                # The same comparison with counters and a ring of its own: those of all are read by others.
                own = copy.copy(state)
                own.shared = _own_memory(state.shared)
                own.launches = LaunchCache()
                choose(canary.backend, held.device).verify(own, held, 1)
                self._begun.append(_RegionLook(own, HostCopy(own.shared.counters, own.shared.ring, slots.clone())))

    def arrived(self) -> bool:
        """Whether `result` does not wait."""
        return all(one.copy.arrived() for one in self._begun)

    def result(self) -> ComparedBytes | None:
        """None where no bytes have fingerprints. Waits for the device, unless all has `arrived`."""
        if not self._begun:
            return None
        slots = changed = compared = present = 0
        at_least, places = False, list[tuple[int, str, str]]()
        for one in self._begun:
            counters, rows, held = one.found()
            count = int((held >= 0).sum())
            slots += count
            present += count * sum(source.slot_bytes for source in one.state.region.sources)
            compared += int(counters[Counter.CHECKED_BYTES])
            changed += len(rows[:, Row.SLOT].unique())
            at_least |= int(counters[Kind.BYTES]) > len(rows)
            places += _places(one.state, rows, held)
        first = min(places, default=None)
        share = min(compared / present, 1.0) if present else 0.0
        if first is None:
            return ComparedBytes(slots, changed, share)
        position, region, source = first
        return ComparedBytes(slots, changed, share, region, source, position, at_least)


def _own_memory(shared: Shared) -> Shared:
    return Shared(torch.zeros_like(shared.counters), shared.clock, torch.zeros_like(shared.ring))


def _places(state: RegionState, rows: Tensor, slots: Tensor) -> Sequence[tuple[int, str, str]]:
    """Position, region and source of each row. ``slots``: of each position."""
    position_of = {slot: position for position, slot in enumerate(slots.tolist())}
    named = ((row[Row.SLOT], state.sources.labels[row[Row.SOURCE]].name) for row in rows.tolist())
    return [(position_of[slot], state.region.name, source) for slot, source in named]
