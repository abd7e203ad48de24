"""`RecordBuffers`: what is known of slots, as buffers that a transfer engine sends beside those of the KV."""

from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.ops.payload import PayloadLayout
from canary_core.ops.state import RegionState
from canary_core.records import PAYLOAD_STAMP


@dataclass(frozen=True, slots=True, eq=False)
class RecordBuffers:
    """A payload of all slots of a region, in three tables that a transfer engine can register like those of the KV: one
    row for each slot, so that page ``i`` of the KV and page ``i`` of these travel together.

    stamps: int64 ``[slots]``; records: int32 ``[slots, 8]``; fingerprints: int64 ``[slots, sources]``. layout: what the
    rows mean in this region; rows of another layout say nothing.

    The sending side gives its own tables away (`of`), the receiving side has an `inbox`, reads from it what has arrived
    (`payload`) and clears it for the next transfer.
    """

    layout: PayloadLayout
    stamps: Tensor
    records: Tensor
    fingerprints: Tensor

    @classmethod
    def of(cls, state: RegionState) -> "RecordBuffers":
        """The region's own tables, which go on changing, each row stamped as this region's. Zeroed stamps make all of
        them unknown to whoever receives them."""
        layout = PayloadLayout.of(state)
        stamps = torch.full((state.region.slots,), layout.stamp, dtype=torch.int64, device=state.records.device)
        return cls(layout, stamps, state.records, state.fingerprints)

    @classmethod
    def inbox(cls, state: RegionState) -> "RecordBuffers":
        """Tables of the same shapes with nothing in them."""
        stamps = torch.zeros(state.region.slots, dtype=torch.int64, device=state.records.device)
        tables = torch.zeros_like(state.records), torch.zeros_like(state.fingerprints)
        return cls(PayloadLayout.of(state), stamps, *tables)

    @property
    def size_bytes(self) -> int:
        """Bytes of all three tables."""
        return self.stamps.nbytes + self.records.nbytes + self.fingerprints.nbytes

    def payload(self, slots: Tensor) -> Tensor:
        """The rows of ``slots`` (int64 ``[n]``, -1 for none) as `import_records` takes them: int64
        ``[n, layout.words]``. If rows of some slots have arrived and of others not, the transfer was cut short: those
        without say that nothing was written there. Never waits for the device."""
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
        """Rows of ``slots`` (int64 ``[n]``, -1 for none) hold nothing any more. Slot 0, which stands for none here,
        must be one that never travels: the null slot."""
        self.stamps.index_fill_(0, slots.clamp(min=0), 0)
