"""`RecordBuffers`: rows of what is known of slots, as buffers that a transfer manager sends beside those of the KV."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_core.canary import Canary
from canary_core.ops.payload import PayloadLayout
from canary_core.region import RegionKind
from canary_sglang.transfer.kv_transfer import plain_names

FEWEST_BUFFERS = 4
"""Of a list with fewer, SGLang's sender could take ours for the second half of a model with one layer."""

LAYER_ID = 1 << 24
"""Layer ids of our entries begin here, where SGLang pairs entries by layer."""

Entry = tuple[int, int, int]
"""Address, length in bytes, bytes of one page."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordBuffers:
    """Rows that travel with a region's slots. stamps: int64 ``[slots]``; records: int32 ``[slots, 8]``; fingerprints:
    int64 ``[slots, sources]``."""

    stamps: Tensor
    records: Tensor
    fingerprints: Tensor

    @classmethod
    def of(cls, canary: Canary, region: str) -> "RecordBuffers":
        """Canary's own tables, stamped as its."""
        state = canary.states[region]
        stamp = PayloadLayout.of(state).stamp
        stamps = torch.full((state.region.slots,), stamp, dtype=torch.int64, device=state.records.device)
        return cls(stamps, state.records, state.fingerprints)

    @classmethod
    def inbox(cls, canary: Canary, region: str) -> "RecordBuffers":
        """Empty rows."""
        state = canary.states[region]
        stamps = torch.zeros(state.region.slots, dtype=torch.int64, device=state.records.device)
        return cls(stamps, torch.zeros_like(state.records), torch.zeros_like(state.fingerprints))

    @property
    def size_bytes(self) -> int:
        """Of all three."""
        return self.stamps.nbytes + self.records.nbytes + self.fingerprints.nbytes

    def entries(self, pages: int, page_slots: int) -> list[Entry]:
        """What is appended to a list whose buffers have ``pages`` pages of ``page_slots`` slots; nothing if the region
        has not that many."""
        if pages * page_slots > self.stamps.shape[0]:
            return []
        tables = [t.view(t.shape[0], -1) for t in (self.stamps, self.records, self.fingerprints)]
        sizes = [(t, page_slots * t[0].nbytes) for t in tables if t[0].numel()]
        return [(t.data_ptr(), pages * item_bytes, item_bytes) for t, item_bytes in sizes]

    def payload(self, layout_: PayloadLayout, slots: Tensor) -> Tensor:
        """The rows of ``slots`` (-1: none) as `Canary.import_slots` takes them. Where some have come and others have
        not, those say that nothing was written."""
        there = slots >= 0
        slot = torch.where(there, slots, 0)
        stamps = torch.where(there, self.stamps[slot], 0)
        fits = stamps >> 32 == layout_.digest
        lost = ~fits & there & fits.any()
        rows = torch.cat((stamps[:, None], self.records.view(torch.int64)[slot], self.fingerprints[slot]), dim=1)
        nothing = torch.zeros_like(rows[:1])
        nothing[:, 0].fill_(layout_.digest << 32)
        return torch.where(lost[:, None], nothing, rows * there[:, None])

    def clear(self, slots: Tensor) -> None:
        """Rows of ``slots`` (-1: none) hold nothing."""
        # Slot 0 is padding, so that it may be written for -1.
        self.stamps.index_fill_(0, slots.clamp(min=0), 0)


class TransferBuffers:
    """TransferBuffers of a session's regions, and where they were appended to a transfer manager's ``KVArgs``."""

    def __init__(self, canary: Canary, make: Callable[[Canary, str], RecordBuffers]) -> None:
        names = plain_names(canary)
        self.by_region = {
            names[plain]: make(canary, names[plain])
            for plain, kind in (("full", RegionKind.FULL), ("swa", RegionKind.WINDOW))
            if plain in names and canary.regions[names[plain]].kind is kind
        }
        self._names = names
        self.kv: list[Entry] = []
        """Our entries at the end of the KV list."""
        self.states: dict[int, list[Entry]] = {}
        """The same by number of the state component."""

    @property
    def registered(self) -> bool:
        """Whether any rows can come."""
        return bool(self.kv or any(self.states.values()))

    def append(self, args: Any) -> None:
        """Appends to the lists of ``args``, before a manager registers them."""
        rider = self.by_region.get(self._names.get("full", ""))
        if rider is not None:
            self.kv = _fitting(rider, args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, args.page_size)
            _extend((args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens), self.kv)
            _extend_ids(args.kv_layer_ids, len(self.kv))
            kinds = getattr(args, "kv_data_mem_kinds", None)
            if kinds:
                kinds.extend(["VRAM"] * len(self.kv))
        rider = self.by_region.get(self._names.get("swa", ""))
        for i, kind in enumerate(args.state_types):
            if rider is not None and getattr(kind, "value", kind) == "swa" and i not in self.states:
                lists = (args.state_data_ptrs[i], args.state_data_lens[i], args.state_item_lens[i])
                self.states[i] = _fitting(rider, *lists, args.page_size)
                _extend(lists, self.states[i])
                _extend_ids(args.state_layer_ids[i], len(self.states[i]))
                # One window pool of one index space.
                break


def _fitting(
    rider: RecordBuffers, ptrs: Sequence[int], lens: Sequence[int], items: Sequence[int], page: int
) -> list[Entry]:
    alike = {length // item for length, item in zip(lens, items, strict=True) if item}
    if len(ptrs) < FEWEST_BUFFERS or len(alike) != 1:
        return []
    return rider.entries(alike.pop(), int(page))


def _extend(lists: Sequence[list[int]], entries: Sequence[Entry]) -> None:
    for values, new in zip(lists, zip(*entries, strict=True), strict=bool(entries)):
        values.extend(new)


def _extend_ids(ids: list[int] | None, count: int) -> None:
    if ids:
        ids.extend(LAYER_ID + i for i in range(count))
