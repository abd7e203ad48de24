"""PD disaggregation: what a prefill engine knows of its slots travels with their bytes to the decode engine.

SGLang's transfer managers are given lists of buffers, (address, length, bytes of one page), and send page i of each. We
append three to the list of a region's KV, on both sides: stamps, records and fingerprints, a row for each slot (a
`RecordBuffers`). On the prefill side these are Canary's own tables, on the decode side an inbox of the same shape.

Appended at the end, the entries can't harm a peer without Canary: a decode engine with more entries than its prefill
engine is what SGLang expects of one with a draft model, and the first ones are paired. The other way round, and where
the peer's entries are of another size, the prefill side leaves ours out. So slots arrive with records or without.

With records they are imported before the request's first forward on the decode side, which then checks positions,
tokens and prefix as for its own, and their bytes are compared at once. Slots whose rows did not come while others of
the request did are taken for unwritten: the transfer was cut short.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from canary_core import BatchView, Canary, Event, RecordBuffers, Region, RegionKind, StepListener
from canary_sglang.batches.tokens import expected_tokens
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import targets
from canary_sglang.compat.registrar import REGISTRAR, Hook
from canary_sglang.transfer.kv_transfer import used_here
from canary_sglang.transfer.transfer_buffers import TransferBuffers


class PrefillSide(StepListener):
    """A prefill engine: nothing arrives here, but what is known leaves with the bytes."""

    def __init__(self, canary: Canary) -> None:
        REGISTRAR.apply(_prefill_hooks())
        self.canary = canary
        self._buffers = TransferBuffers(canary, canary.slots.record_buffers)
        self._peers: set[tuple[str, int]] = set()
        self._left_out = False
        self.carried = True
        _SIDES.append(self)

    def registering(self, args: Any) -> None:
        """A transfer manager is about to register ``args``."""
        self._buffers.append(args)
        _tell_travel(self.canary, "pd prefill", self._buffers)

    def meeting(self, manager: Any, peer: Any) -> None:
        """A decode engine has told its buffers, and the manager is about to pair them with its own."""
        args, ours = manager.kv_args, len(self._buffers.kv)
        same = peer.decode_tp_size == manager.attn_tp_size and not getattr(peer, "requires_dcp_relayout", False)
        if ours and not (same and _ends_alike(args.kv_item_lens, peer.dst_kv_item_lens, ours)):
            # For all peers from now on: they share the list. Those met before have our rows last, too.
            for values in (args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, args.kv_layer_ids):
                if values:
                    del values[-ours:]
            kinds = getattr(args, "kv_data_mem_kinds", None)
            if kinds:
                del kinds[-ours:]
            self._buffers.kv = []
            self._leave_out(peer)
        theirs = getattr(peer, "dst_state_item_lens", None) or []
        for i, entries in self._buffers.states.items():
            if entries and i < len(theirs) and same and _ends_alike(args.state_item_lens[i], theirs[i], len(entries)):
                self._peers.add((peer.agent_name, i))
            elif entries:
                self._leave_out(peer)

    def sending(self, manager: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """What to send instead of ``arguments``: where a state component ends with our rows, buffer by buffer to a
        peer that takes them, and without them to another one."""
        component = next(
            (i for i, ptrs in enumerate(manager.kv_args.state_data_ptrs) if ptrs is arguments["src_data_ptrs"]), -1
        )
        ours = len(self._buffers.states.get(component, ()))
        if not ours:
            return arguments
        if (arguments["peer_name"], component) in self._peers:
            return {**arguments, "force_flat": True}
        cut = ("src_data_ptrs", "item_lens", "src_layer_ids")
        return {k: v[:-ours] if k in cut and v else v for k, v in arguments.items()}

    def close(self) -> None:
        """What leaves from now on says nothing: our tables stand still and the bytes don't. The manager goes on with
        the longer lists, so this object goes on telling it how to send them."""
        _SIDES.remove(self)
        for buffers in self._buffers.by_region.values():
            buffers.stamps.zero_()

    def _leave_out(self, peer: Any) -> None:
        if not self._left_out:
            self._left_out = True
            reason = (
                "a decode engine takes no records: it runs without Canary, with another pool, or with another "
                "CANARY_BYTES; what it receives is not judged there"
            )
            self.canary.tell(Event("records_left_out", "warning", {"peer": peer.agent_name, "reason": reason}))


def _ends_alike(own: Sequence[int], other: Sequence[int], count: int) -> bool:
    return len(own) == len(other) and list(own[-count:]) == list(other[-count:])


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """One request's KV: its slots by position from ``start`` on, as far as they are sent."""

    request: Any
    start: int
    slots: Tensor


class DecodeSide(StepListener):
    """A decode engine. ``carried``: whether records may come with the bytes; if not, slots are only not judged."""

    def __init__(self, canary: Canary, requests: RequestWriters, carried: bool) -> None:
        REGISTRAR.apply(_decode_hooks(carried))
        self.carried = carried
        self.counts = {"transfers": 0, "imported_transfers": 0}
        # Whether more than the new slots is sent: a window or an indexer, whatever the decode engine has of it.
        self._whole = True
        self.canary = canary
        self._requests = requests
        self._buffers = TransferBuffers(canary, canary.slots.empty_buffers) if carried else None
        self._announced: WeakKeyDictionary[Any, _Transfer] = WeakKeyDictionary()
        self._arrived: dict[str, _Transfer] = {}
        self._first: dict[str, _Transfer] = {}
        _SIDES.append(self)

    def registering(self, args: Any) -> None:
        """A transfer manager is about to register ``args``."""
        self._whole = bool(args.state_types)
        if self._buffers is not None:
            self._buffers.append(args)
            _tell_travel(self.canary, "pd decode", self._buffers)

    def allocated(self, request: Any, prefix: Tensor | None, start: int, slots: Tensor) -> None:
        """Slots were taken for ``request``'s KV from position ``start`` on, and the prefill engine will be told of
        them next; from then on their bytes may change at any time. ``prefix``: slots before them, which hold KV."""
        if not self.canary.enabled:
            return
        if self._whole and prefix is not None and len(prefix):
            self._expect(prefix.to(slots.device))
        self._expect(slots)
        if slots.is_cuda:
            # SGLang reads these slots' numbers on the host next, so it would wait here anyway.
            torch.cuda.current_stream(slots.device).synchronize()
        sent = len(request.origin_input_ids)
        if getattr(request, "pd_rebootstrap_in_progress", False):
            sent += len(request.output_ids)
        self._announced[request] = _Transfer(request, start, slots[: max(sent - start, 0)])

    def _expect(self, slots: Tensor) -> None:
        inboxes = self._buffers.by_region if self._buffers is not None else {}
        for region in self.canary.regions:
            own = self.canary.regions[region].slots_of(slots)
            self.canary.slots.expect(region, own)
            if region in inboxes:
                inboxes[region].clear(own)
            self.canary.slots.forget(region, own)

    def received(self, request: Any) -> None:
        """``request``'s KV has arrived, or failed to."""
        transfer = self._announced.pop(request, None)
        self.counts["transfers"] += 1
        registered = self._buffers is not None and self._buffers.registered
        if transfer is not None and request.finished_reason is None and registered:
            self._arrived = {name: t for name, t in self._arrived.items() if t.request.finished_reason is None}
            self._arrived[request.rid] = transfer

    def begin(self, batch: Any) -> None:
        """Imports the KV of requests whose first forward this is, and compares its bytes."""
        self._first = {}
        if not self._arrived or batch is None or not batch.rids:
            return
        first = [name for name in batch.rids if name in self._arrived]
        self._first = {name: self._arrived.pop(name) for name in first}
        for transfer in self._first.values():
            self._import(transfer, self._buffers.by_region if self._buffers is not None else {})

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """Has the tokens of those requests checked."""
        if not self._first or view is None or view.expected_tokens is not None:
            return view
        requests = [self._first[name].request if name in self._first else None for name in batch.rids]
        ends = [0 if request is None else len(request.origin_input_ids) for request in requests]
        return replace(view, expected_tokens=expected_tokens(requests, ends, view.device))

    def flushed(self) -> None:
        """Nothing is on its way any more."""
        self._arrived = {}

    def close(self) -> None:
        """Says how much has come."""
        _SIDES.remove(self)
        self.canary.tell(Event("records_travelled", fields={"with": "pd decode", **self.counts}))

    def _import(self, transfer: _Transfer, by_region: Mapping[str, RecordBuffers]) -> None:
        self.counts["imported_transfers"] += 1
        writer = self._requests.writers.id(f"{transfer.request.rid} (prefill)")
        end = transfer.start + len(transfer.slots)
        used_here(transfer.slots)
        for region, buffers in by_region.items():
            guarded = self.canary.regions[region]
            slots = transfer.slots
            if guarded.window_tokens is not None:
                # No more than the window is sent.
                slots = slots[max(end - guarded.window_tokens + 1 - transfer.start, 0) :]
            own = guarded.slots_of(slots)
            if not len(own):
                continue
            self.canary.slots.import_records(region, own, buffers.payload(own), writer)
            buffers.clear(own)
            self.canary.slots.check(region, own)


def _tell_travel(canary: Canary, what: str, buffers: TransferBuffers) -> None:
    sizes = {region: kept.size_bytes for region, kept in buffers.by_region.items()}
    fields = {"with": what, "carried": buffers.registered, "buffers_bytes": sizes}
    canary.tell(Event("records_travel", "info" if buffers.registered else "warning", fields))


def refusal(regions: Sequence[Region]) -> str | None:
    """Why a decode engine's pool can't be guarded, None if it can."""
    states = sorted(region.name for region in regions if region.kind is RegionKind.STATE)
    return f"a PD decode engine receives {', '.join(states)} without a forward; not covered yet" if states else None


_SIDES: list[PrefillSide | DecodeSide] = []
"""Of this process, the newest last."""

_MANAGERS: WeakKeyDictionary[Any, PrefillSide | DecodeSide] = WeakKeyDictionary()
"""Which side each transfer manager's lists were made for."""


def _prefill_hooks() -> dict[str, Hook]:
    return {
        targets.NIXL_MANAGER: (_registering, "BEFORE"),
        targets.NIXL_MEET: (_meeting, "BEFORE"),
        targets.NIXL_SEND: (_sending, "AROUND"),
    }


def _decode_hooks(carried: bool) -> dict[str, Hook]:
    hooks: dict[str, Hook] = {
        targets.PREALLOCATE: (_preallocated, "AFTER"),
        targets.COMMIT: (_committed, "AFTER"),
    }
    return {**hooks, targets.NIXL_MANAGER: (_registering, "BEFORE")} if carried else hooks


def _registering(manager: Any, *args: Any, **kwargs: Any) -> None:
    kv_args = args[0] if args else kwargs["args"]
    side = next((side for side in reversed(_SIDES) if side.carried and side.canary.enabled), None)
    if side is not None:
        _MANAGERS[manager] = side
        with side.canary.guard("disaggregation register"):
            side.registering(kv_args)


def _meeting(manager: Any, *args: Any, **kwargs: Any) -> None:
    peer = args[0] if args else kwargs["peer_info"]
    side = _MANAGERS.get(manager)
    if isinstance(side, PrefillSide):
        with side.canary.guard("disaggregation meet"):
            side.meeting(manager, peer)


def _sending(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    side = _MANAGERS.get(manager)
    if isinstance(side, PrefillSide) and not args:
        with side.canary.guard("disaggregation send"):
            kwargs = side.sending(manager, kwargs)
    return original(manager, *args, **kwargs)


def _preallocated(result: Any, queue: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    given = dict(zip(("prefix_indices", "prefix_len", "total_prefix_len"), args, strict=False)) | kwargs
    start = given.get("total_prefix_len")
    start = int((given.get("prefix_len") if start is None else start) or 0)
    for side in _SIDES:
        if isinstance(side, DecodeSide) and isinstance(result, Tensor):
            with side.canary.guard("disaggregation allocate"):
                side.allocated(request, given.get("prefix_indices"), start, result)


def _committed(result: Any, queue: Any, decode_request: Any, *args: Any, **kwargs: Any) -> None:
    for side in _SIDES:
        if isinstance(side, DecodeSide):
            with side.canary.guard("disaggregation commit"):
                side.received(decode_request.req)
