"""`RecordBuffers`: records as buffers that a transfer engine sends beside those of the KV."""

from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.ops.payload import PayloadLayout
from canary_core.ops.state import RegionState
from canary_core.records import PAYLOAD_STAMP


@dataclass(frozen=True, slots=True, eq=False)
class RecordBuffers:
    """A payload of all slots of a region, in three tables that a transfer engine can register beside the KV's: one row
    for each slot, so page ``i`` of the KV and page ``i`` of the tables travel together.

    stamps: int64 ``[slots]``; records: int32 ``[slots, 8]``; fingerprints: int64 ``[slots, sources]``. layout: meaning
    of the rows in the region; rows of another layout say nothing.

    The sender registers the region's own tables (`of`); the receiver has an `inbox`, reads arrived rows (`payload`),
    and clears them for the next transfer.
    """

    layout: PayloadLayout
    stamps: Tensor
    records: Tensor
    fingerprints: Tensor

    @classmethod
    def of(cls, state: RegionState) -> "RecordBuffers":
        """The region's own live tables, each row stamped with the region's layout. Zeroed stamps make every row unknown
        to a receiver."""
        layout = PayloadLayout.of(state)
        stamps = torch.full((state.region.slots,), layout.stamp, dtype=torch.int64, device=state.records.device)
        return cls(layout, stamps, state.records, state.fingerprints)

    @classmethod
    def inbox(cls, state: RegionState) -> "RecordBuffers":
        """Empty tables of the same shapes."""
        stamps = torch.zeros(state.region.slots, dtype=torch.int64, device=state.records.device)
        tables = torch.zeros_like(state.records), torch.zeros_like(state.fingerprints)
        return cls(PayloadLayout.of(state), stamps, *tables)

    @property
    def size_bytes(self) -> int:
        """Bytes of all three tables."""
        return self.stamps.nbytes + self.records.nbytes + self.fingerprints.nbytes

    def payload(self, slots: Tensor) -> Tensor:
        """The rows of ``slots`` (int64 ``[n]``, -1 for none) for `import_records`: int64 ``[n, layout.words]``. If only
        some rows have arrived, the transfer was cut short: the missing rows say that nothing was written. Never waits
        for the device."""
        inside = slots >= 0
        slot = torch.where(inside, slots, 0)
        stamps = torch.where(inside, self.stamps[slot], 0)
        arrived = stamps >> 32 == self.layout.digest
        missing = ~arrived & inside & arrived.any()
        rows = torch.cat((stamps[:, None], self.records.view(torch.int64)[slot], self.fingerprints[slot]), dim=1)
        nothing = torch.zeros_like(rows[:1])
        nothing[:, PAYLOAD_STAMP].fill_(self.layout.digest << 32)
        return torch.where(missing[:, None], nothing, rows * inside[:, None])

    def clear(self, slots: Tensor) -> None:
        """Empties the rows of ``slots`` (int64 ``[n]``, -1 for none). Slot 0 stands for none here and must never
        travel: the null slot."""
        self.stamps.index_fill_(0, slots.clamp(min=0), 0)
