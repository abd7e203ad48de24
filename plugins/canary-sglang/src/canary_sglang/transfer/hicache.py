"""HiCache: the records of slots go to host memory with the slots' bytes, and come back with them.

When SGLang writes a page to the host (`HiCacheController.start_writing`), the records of its slots go to a table in
host memory, by host slot. When the page is loaded to other slots (`start_loading`), the records are imported before the
forward that reads these slots, so that the forward's table is checked. The bytes are compared after all layers have
arrived, since SGLang loads layer by layer during the forward. Host slots filled in another way (from a storage back
end) have no records; loads from them are compared by prefix, see `storage`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_adapters import upload
from canary_core import Arrival, AttachError, BatchView, Canary, Event, HostCopy, PayloadRecords, StepListener
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import targets
from canary_sglang.compat.registrar import REGISTRAR, Hook
from canary_sglang.transfer.kv_transfer import plain_names, used_here
from canary_sglang.transfer.storage import Sought, StoredPages

REGIONS = frozenset({"full", "swa"})
"""Names of the regions moved by HiCache that can be followed."""


class HostCache(StepListener):
    """Follows HiCache for one session's pool. ``carried``: whether records go with the bytes; if not, loaded slots are
    unknown. ``requests``: those with loads from a storage back end, for the comparison; None without one."""

    def __init__(self, canary: Canary, pool: Any, carried: bool = True, requests: RequestWriters | None = None) -> None:
        REGISTRAR.apply(_hooks())
        self._carried = carried
        self.counts = {"parked_slots": 0, "loaded_slots": 0, "unknown_slots": 0, "expected_slots": 0}
        self.canary = canary
        self._pool = pool
        self._names = plain_names(canary)
        full = self._names.get("full")
        self._stored = StoredPages(canary, full, requests) if full is not None and requests is not None else None
        self._parked: dict[str, ParkedRecords] = {}
        self._loads: list[_Load] = []
        _ATTACHED.append(self)

    def concerns(self, controller: Any) -> bool:
        """Whether the controller moves the session's KV. The served model's controller also moves a draft model's."""
        pools = (self._pool, getattr(self._pool, "full_kv_pool", None))
        moved = (controller.mem_pool_device, getattr(controller, "mem_pool_device_draft", None))
        return self.canary.enabled and any(pool is not None and pool in pools for pool in moved)

    def writing(self, controller: Any) -> None:
        """To be called before the controller copies its write queue to the host."""
        for region, host_pool, host_slots, slots in self._transfers(controller, controller.write_queue):
            if self._stored is not None and region == self._names["full"]:
                self._stored.leaving(controller, slots)
            if not self._carried:
                continue
            parked = self._parked.get(region)
            if parked is None:
                parked = self._parked[region] = ParkedRecords(self.canary, region, host_pool)
            parked.park(host_slots, slots, [load.slots for load in self._loads if load.region == region])
            self.counts["parked_slots"] += len(slots)

    def queued(self, controller: Any) -> None:
        """To be called after the controller has allocated slots for its load queue. The slots are in the cache from now
        on, but loaded only with the next prefill."""
        for region, _, host_slots, slots in self._transfers(controller, controller.load_queue[-1:]):
            parked = self._parked.get(region)
            if self._stored is not None and region == self._names["full"]:
                self._stored.loads(controller, slots, None if parked is None else parked.known(host_slots))
            self.canary.slots.forget(region, slots)

    def sought(self, controller: Any, request: Any, loaded: int) -> None:
        """To be called after the cache has queued a load of ``loaded`` tokens for ``request``."""
        if self._stored is not None and loaded and controller.load_queue:
            self._stored.sought(controller.load_queue[-1], request, loaded)

    def loading(self, controller: Any) -> "list[_Load]":
        """To be called before the controller copies its load queue to the device: the slots' old content is no longer
        checked. The result must be passed to `loaded` afterwards."""
        loads = []
        for operation in list(controller.load_queue):
            for region, _, host_slots, slots in self._transfers(controller, [operation]):
                self.canary.slots.expect(region, slots)
                self.canary.slots.forget(region, slots)
                parked = self._parked.get(region)
                known, payload = (None, None) if parked is None else parked.fetch(host_slots)
                count = 0 if known is None else int(known.sum())
                self.counts["loaded_slots"] += len(slots)
                self.counts["unknown_slots"] += len(slots) - count
                load = _Load(region, slots, payload if count else None)
                if self._stored is not None and region == self._names["full"]:
                    load.coming = self._coming(controller, operation, slots, known if count else None)
                if load.payload is not None or load.coming is not None:
                    loads.append(load)
        return loads

    def _coming(self, controller: Any, operation: Any, slots: Tensor, known: Tensor | None) -> "_Coming | None":
        found = None if self._stored is None else self._stored.coming(controller, operation, known)
        if found is None:
            return None
        begin, sought = found
        end = begin + len(sought.tokens) - sought.first
        slots = slots[begin:end]
        if known is None:
            return _Coming(controller, sought, slots, len(slots))
        # Those with records are compared with them.
        known = known[begin:end]
        slots = torch.where(upload(known.tolist(), slots.device, torch.bool), -1, slots)
        return _Coming(controller, sought, slots, int(known.logical_not().sum()))

    def loaded(self, loads: "list[_Load]", counter: Any, producer: int) -> None:
        """To be called after the controller has issued the copies of ``loads``. The forward that waits for them names
        ``producer``."""
        for load in loads:
            load.counter, load.producer, load.done = counter, producer, counter.events[producer].finish_event
        self._loads += loads

    def reused(self, host_pool: Any, host_slots: Tensor) -> None:
        """To be called when the host pool has handed out slots: their records are void."""
        for parked in self._parked.values():
            if parked.host_pool is host_pool:
                parked.forget(host_slots)

    def parked(self, plain: str) -> "ParkedRecords | None":
        """Records of the host slots of the region ``plain`` (its name without the model); None if there are none."""
        return self._parked.get(self._names.get(plain, ""))

    def begin(self, batch: Any) -> None:
        """Imports the records of loads awaited by the forward, and of complete ones."""
        for load in self._loads:
            if not load.imported and load.due():
                if self.canary.compares_reads(load.region):
                    load.done.wait()
                used_here(load.slots)
                if load.payload is not None:
                    self.canary.slots.import_records(load.region, load.slots, load.payload)
                load.imported = True
                self._expect(load)

    def _expect(self, load: "_Load") -> None:
        """Announces the load's arrival to the ledger."""
        if load.coming is None or self._stored is None:
            return
        coming, load.coming = load.coming, None
        used_here(coming.slots)
        arrival = self._stored.arrival(coming.controller, coming.sought, coming.slots)
        if arrival is None:
            return
        self.counts["expected_slots"] += coming.count
        self.counts["unknown_slots"] -= coming.count
        self.canary.ledger.expect(arrival)
        if self.canary.compares_reads(load.region):
            # It is there already, and is compared before the forward reads it.
            self.canary.ledger.arrive(arrival)
        else:
            load.arrival = arrival

    def after(self, batch: Any, view: BatchView | None) -> None:
        """Compares the bytes of slots with imported records, or of expected arrivals."""
        if not self._loads:
            return
        for load in self._loads:
            if load.imported:
                # No further wait if all layers of the forward read KV: then the forward has waited already.
                load.done.wait()
                if load.payload is not None:
                    self.canary.slots.check(load.region, load.slots)
                if load.arrival is not None:
                    self.canary.ledger.arrive(load.arrival)
        self._loads = [load for load in self._loads if not load.imported]

    def flushed(self) -> None:
        """Drops loads not yet imported."""
        for load in self._loads:
            if load.arrival is not None:
                self.canary.ledger.give_up(load.arrival)
        self._loads = []

    def close(self) -> None:
        """Stops following the controllers, and tells how many slots were moved."""
        _ATTACHED.remove(self)
        self.canary.tell(Event("records_travelled", fields={"with": "hicache", **self.counts}))

    def _transfers(self, controller: Any, operations: Sequence[Any]) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
        """For each queued copy of a guarded region: region, host pool, host slots and device slots."""
        for operation in list(operations):
            yield from self._named("full", controller.mem_pool_host, operation)
            for transfer in getattr(operation, "pool_transfers", None) or ():
                if transfer.indices_from_pool is None and str(transfer.name) in REGIONS - {"full"}:
                    yield from self._named(
                        str(transfer.name), controller.mem_pool_host.get_pool(transfer.name), transfer
                    )

    def _named(self, plain: str, host_pool: Any, transfer: Any) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
        name, host_slots, slots = self._names.get(plain), transfer.host_indices, transfer.device_indices
        if name is not None and host_slots is not None and slots is not None and len(slots):
            yield name, host_pool, host_slots, slots.to(self.canary.regions[name].device)


class ParkedRecords:
    """The records of one region's host slots: payloads in host memory, int64 ``[host slots, words]``.

    Never waits for the device: slots with a late payload are unknown.
    """

    def __init__(self, canary: Canary, region: str, host_pool: Any) -> None:
        # In a group of host pools, all have the slots of the one that allocates.
        self.host_pool = host_pool.anchor_entry.host_pool if hasattr(host_pool, "anchor_entry") else host_pool
        self._canary = canary
        self._region = region
        self.slots = int(getattr(self.host_pool, "logical_size", self.host_pool.size))
        layout = canary.slots.payload_layout(region)
        if layout is None:
            raise AttachError(f"no region {region!r} is guarded, so nothing of it can be parked")
        self._layout = layout
        self._table = torch.zeros(self.slots, layout.words, dtype=torch.int64, device="cpu")
        self._known = torch.zeros(self.slots, dtype=torch.bool, device="cpu")
        self._age = torch.zeros(self.slots, dtype=torch.int32, device="cpu")
        self._coming: deque[_Parking] = deque()
        fields = {
            "with": "hicache",
            "region": region,
            "host_slots": self.slots,
            "host_memory_bytes": self._table.nbytes + self._known.nbytes + self._age.nbytes,
        }
        canary.tell(Event("records_travel", fields=fields))

    def park(self, host_slots: Tensor, slots: Tensor, arriving: Sequence[Tensor]) -> None:
        """Starts copying the records of ``slots`` to ``host_slots``, on the current stream. ``arriving``: slots with
        own records not yet imported, and so unknown."""
        # Queued events stay queued (``settle=False``): this is not the stream of the forwards, and none of these events
        # changes the records that are copied.
        payload = self._canary.slots.export_records(self._region, slots, settle=False)
        for others in arriving:
            payload = payload * ~torch.isin(slots, others)[:, None]
        host_slots = host_slots.cpu()
        self.forget(host_slots)
        self._coming.append(_Parking(host_slots, self._age[host_slots], HostCopy(payload)))
        self._settle()

    def fetch(self, host_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each of ``host_slots`` is known, bool ``[n]``, and the payload of all, in pinned memory, to be copied
        without a wait."""
        host_slots = host_slots.cpu()
        known = self.known(host_slots)
        rows = torch.empty(
            len(host_slots), self._table.shape[1], dtype=torch.int64, pin_memory=torch.cuda.is_available(), device="cpu"
        )
        torch.index_select(self._table, 0, host_slots, out=rows)
        return known, rows.mul_(known[:, None])

    def known(self, host_slots: Tensor) -> Tensor:
        """Whether each of ``host_slots`` has records: bool ``[n]``."""
        self._settle()
        return self._known[host_slots.cpu()]

    def records(self, host_slots: Tensor) -> PayloadRecords:
        """The records of ``host_slots`` (a tensor on the host), as of the bytes' departure from the device."""
        self._settle()
        return self._layout.read(self._table[host_slots] * self._known[host_slots][:, None])

    def forget(self, host_slots: Tensor) -> None:
        """Makes ``host_slots`` unknown: they will hold other bytes."""
        self._known[host_slots] = False
        self._age[host_slots] += 1

    def _settle(self) -> None:
        """Stores arrived payloads, except those of host slots reused meanwhile."""
        while self._coming and self._coming[0].payload.arrived():
            parking = self._coming.popleft()
            (payload,) = parking.payload.tensors
            current = self._age[parking.host_slots] == parking.age
            self._table[parking.host_slots[current]] = payload[current]
            self._known[parking.host_slots[current]] = self._layout.read(payload[current]).known


@dataclass(slots=True, eq=False)
class _Parking:
    """A payload on its way to the table. ``age``: number of reuses of its host slots when the copy began."""

    host_slots: Tensor
    age: Tensor
    payload: HostCopy


@dataclass(frozen=True, slots=True, eq=False)
class _Coming:
    """The part of a load without records: to ``slots``, in the order of the sequence, -1 for those with records.
    ``count``: the number without."""

    controller: Any
    sought: Sought
    slots: Tensor
    count: int


@dataclass(slots=True, eq=False)
class _Load:
    """Slots under loading. ``payload``: their records, if any. ``coming``: the part without records; ``arrival``: the
    same, once expected by the ledger. ``counter``: SGLang's counter of loaded layers. ``done``: event of the last
    layer's copy."""

    region: str
    slots: Tensor
    payload: Tensor | None
    coming: _Coming | None = None
    arrival: Arrival | None = None
    counter: Any = None
    producer: int = -1
    done: Any = None
    imported: bool = False

    def due(self) -> bool:
        """Whether the next forward waits for the load, or the load is complete."""
        return self.counter.consumer_index == self.producer or bool(self.done.query())


def refusal(regions: Sequence[str]) -> str | None:
    """Why a pool with ``regions`` can't be guarded beside HiCache, None if it can."""
    others = sorted({name.rpartition("/")[2] for name in regions} - REGIONS)
    return f"HiCache loads KV of {', '.join(others)} without a forward; not covered yet" if others else None


_ATTACHED: list[HostCache] = []


def _hooks() -> dict[str, Hook]:
    functions: dict[str, Hook] = {
        targets.HICACHE_WRITE: (_writing, "BEFORE"),
        targets.HYBRID_WRITE: (_writing, "BEFORE"),
        targets.HICACHE_QUEUE: (_queued, "AFTER"),
        targets.HYBRID_QUEUE: (_queued, "AFTER"),
        targets.HICACHE_LOAD: (_loading, "AROUND"),
        targets.HYBRID_LOAD: (_loading, "AROUND"),
        targets.HOST_ALLOCATE: (_allocated, "AFTER"),
    }
    hooks = {target: functions[target] for target in targets.hicache_targets()}
    return {**hooks, **dict.fromkeys(targets.existing(targets.LOAD_BACKS), (_sought, "AFTER"))}


def _writing(controller: Any, *args: Any, **kwargs: Any) -> None:
    for cache in _concerned(controller):
        with cache.canary.guard("HostCache.writing"):
            cache.writing(controller)


def _queued(result: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    if result is not None:
        for cache in _concerned(controller):
            with cache.canary.guard("HostCache.queued"):
                cache.queued(controller)


def _sought(result: Any, cache: Any, *args: Any, **kwargs: Any) -> None:
    controller = getattr(cache, "cache_controller", None)
    request = getattr(args[0] if args else kwargs.get("params"), "req", None)
    if controller is None or request is None or not isinstance(result, tuple):
        return
    for host_cache in _concerned(controller):
        with host_cache.canary.guard("HostCache.sought"):
            # Up to 0.5.21 their slots, later their number.
            loaded = result[0] if isinstance(result[0], int) else len(result[0])
            host_cache.sought(controller, request, loaded)


def _loading(original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any) -> Any:
    begun: list[tuple[HostCache, list[_Load]]] = []
    for cache in _concerned(controller):
        with cache.canary.guard("HostCache.loading"):
            begun.append((cache, cache.loading(controller)))
    producer = original(controller, *args, **kwargs)
    for cache, loads in begun:
        if loads and producer >= 0:
            with cache.canary.guard("HostCache.loaded"):
                cache.loaded(loads, controller.layer_done_counter, producer)
    return producer


def _allocated(result: Any, host_pool: Any, *args: Any, **kwargs: Any) -> None:
    if result is not None:
        for cache in list(_ATTACHED):
            with cache.canary.guard("HostCache.allocated"):
                cache.reused(host_pool, result)


def _concerned(controller: Any) -> list[HostCache]:
    return [cache for cache in _ATTACHED if cache.concerns(controller)]
