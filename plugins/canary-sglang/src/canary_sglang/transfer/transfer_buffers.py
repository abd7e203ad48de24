"""`TransferBuffers`: records of slots, as buffers for a transfer manager beside those of the KV."""

from collections.abc import Callable, Sequence
from typing import Any

from canary_core import Canary, RecordBuffers, RegionKind
from canary_sglang.transfer.kv_transfer import plain_names

FEWEST_BUFFERS = 4
"""Nothing is appended to a shorter list: with one layer, SGLang's sender could take Canary's entries for half of the
model's."""

LAYER_ID = 1 << 24
"""First layer id of Canary's entries, where SGLang pairs entries by layer."""

Entry = tuple[int, int, int]
"""Address, length in bytes, bytes of one page."""


class TransferBuffers:
    """The `RecordBuffers` of a session's regions, and their entries in the lists of a transfer manager's ``KVArgs``.
    ``make``: makes the buffers of a region."""

    def __init__(self, canary: Canary, make: Callable[[str], RecordBuffers]) -> None:
        names = plain_names(canary)
        self.by_region = {
            names[plain]: make(names[plain])
            for plain, kind in (("full", RegionKind.FULL), ("swa", RegionKind.WINDOW))
            if plain in names and canary.regions[names[plain]].kind is kind
        }
        self._names = names
        self.kv: list[Entry] = []
        """Canary's entries, at the end of the KV list."""
        self.states: dict[int, list[Entry]] = {}
        """Canary's entries at the end of state components' lists, by the component's number."""

    @property
    def registered(self) -> bool:
        """Whether anything was appended, so that records can be transferred."""
        return bool(self.kv or any(self.states.values()))

    def append(self, args: Any) -> None:
        """Appends the entries to the lists of ``args``. To be called before a manager registers them."""
        buffers = self.by_region.get(self._names.get("full", ""))
        if buffers is not None:
            self.kv = _fitting(buffers, args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, args.page_size)
            _extend((args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens), self.kv)
            _extend_ids(args.kv_layer_ids, len(self.kv))
            kinds = getattr(args, "kv_data_mem_kinds", None)
            if kinds:
                kinds.extend(["VRAM"] * len(self.kv))
        buffers = self.by_region.get(self._names.get("swa", ""))
        for i, kind in enumerate(args.state_types):
            if buffers is not None and getattr(kind, "value", kind) == "swa" and i not in self.states:
                lists = (args.state_data_ptrs[i], args.state_data_lens[i], args.state_item_lens[i])
                self.states[i] = _fitting(buffers, *lists, args.page_size)
                _extend(lists, self.states[i])
                _extend_ids(args.state_layer_ids[i], len(self.states[i]))
                # A model has one window pool, with one index space.
                break


def entries(buffers: RecordBuffers, pages: int, page_slots: int) -> list[Entry]:
    """The entries to append to a list whose buffers have ``pages`` pages of ``page_slots`` slots; none if the region
    has fewer slots."""
    if pages * page_slots > buffers.stamps.shape[0]:
        return []
    tables = [t.view(t.shape[0], -1) for t in (buffers.stamps, buffers.records, buffers.fingerprints)]
    sizes = [(t, page_slots * t[0].nbytes) for t in tables if t[0].numel()]
    return [(t.data_ptr(), pages * item_bytes, item_bytes) for t, item_bytes in sizes]


def _fitting(
    buffers: RecordBuffers, ptrs: Sequence[int], lens: Sequence[int], items: Sequence[int], page: int
) -> list[Entry]:
    alike = {length // item for length, item in zip(lens, items, strict=True) if item}
    if len(ptrs) < FEWEST_BUFFERS or len(alike) != 1:
        return []
    return entries(buffers, alike.pop(), int(page))


def _extend(lists: Sequence[list[int]], entries: Sequence[Entry]) -> None:
    for values, new in zip(lists, zip(*entries, strict=True), strict=bool(entries)):
        values.extend(new)


def _extend_ids(ids: list[int] | None, count: int) -> None:
    if ids:
        ids.extend(LAYER_ID + i for i in range(count))
