"""`ParkedRecords`: evidence of records for slots that hold a parked prefix."""

from collections.abc import Mapping

import torch

from canary_core.ops.mapping import Seen
from canary_core.ops.state import TOKEN_KINDS, RegionState
from canary_core.recomputer import CachedRequest
from canary_core.runtime.host_copy import HostCopy


class ParkedRecords:
    """The records of the slots of a parked prefix, on their way to the host. On the stream of the forwards, between two
    forwards; never waits."""

    def __init__(self, states: Mapping[str, RegionState], cached: CachedRequest) -> None:
        self._cached = cached
        self._copies: list[tuple[RegionState, HostCopy]] = []
        for name, slots in cached.slots.items():
            state = states[name]
            if state.region.kind in TOKEN_KINDS:
                records = state.records[slots.clamp(0, state.region.slots - 1)]
                self._copies.append((state, HostCopy(slots, records)))

    def arrived(self) -> bool:
        """Whether `left` does not wait."""
        return all(copy.arrived() for _, copy in self._copies)

    def left(self, later: "ParkedRecords") -> int:
        """Number of tokens from the first on in slots that held the same prefix, with the same records, now and
        ``later``."""
        position = torch.arange(len(self._cached.tokens), device="cpu")
        token = torch.tensor(self._cached.tokens, dtype=torch.int64, device="cpu")
        held = torch.ones_like(position, dtype=torch.bool)
        for (state, copy), (_, again) in zip(self._copies, later._copies, strict=True):
            copy.wait()
            again.wait()
            slots, records = copy.tensors
            seen = Seen.of(records, slots, state.region.status_of(slots))
            before = seen[(position - 1).clamp(min=0)]
            linked, _ = seen.continues(position, before.hash, (position > 0) & before.usable & (before.hash != 0))
            same = seen.holds(position) & (seen.token == token) & linked & (records == again.tensors[1]).all(1)
            held &= same | (slots < 0)
        return len(position) if bool(held.all()) else int(held.int().argmin())
