"""PD disaggregation: a prefill engine's records go to the decode engine with the bytes of their slots.

SGLang's transfer managers get lists of buffers (address, length, bytes of one page) and send page i of each. On both
sides, Canary appends three buffers to the list of a region's KV: stamps, records and fingerprints, with a row for each
slot (a `RecordBuffers`). On the prefill side these are Canary's own tables, on the decode side an inbox of the same
shape.

Entries at the end can't harm a peer without Canary. If only the decode engine has them, SGLang pairs the first entries,
as with a decode engine that also has a draft model. If only the prefill engine has them, or the sizes differ, the
prefill side removes them. So slots arrive with records or without.

Records are imported before the request's first forward on the decode side. The forward then checks positions, tokens
and prefix as for the engine's own slots, and the bytes are compared before it. If the records of only some slots of a
request arrive, the transfer was incomplete, and the other slots count as unwritten.
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
from canary_sglang.compat import disaggregated, schedulers, targets
from canary_sglang.compat.registrar import REGISTRAR, Hook
from canary_sglang.transfer.kv_transfer import used_here
from canary_sglang.transfer.transfer_buffers import TransferBuffers


class PrefillSide(StepListener):
    """The prefill engine's side, the sender of records."""

    def __init__(self, canary: Canary) -> None:
        REGISTRAR.apply(_prefill_hooks())
        self.canary = canary
        self._buffers = TransferBuffers(canary, canary.slots.record_buffers)
        self._peers: set[tuple[str, int]] = set()
        self._left_out = False
        self.carried = True
        _SIDES.append(self)

    def registering(self, args: Any) -> None:
        """To be called before a transfer manager registers ``args``: appends the buffers."""
        self._buffers.append(args)
        _tell_travel(self.canary, "pd prefill", self._buffers)

    def meeting(self, manager: Any, peer: Any) -> None:
        """To be called before the manager pairs its buffers with those of a decode engine, ``peer``: removes Canary's
        if unfit."""
        args, ours = manager.kv_args, len(self._buffers.kv)
        same = peer.decode_tp_size == manager.attn_tp_size and not getattr(peer, "requires_dcp_relayout", False)
        if ours and not (same and _ends_alike(args.kv_item_lens, peer.dst_kv_item_lens, ours)):
            # All peers share the list, so this holds for all of them. Earlier peers still pair the entries before it.
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
        """The arguments to send with instead of ``arguments``. They differ where the list of a state component ends
        with Canary's buffers: a fit peer gets each buffer by itself, another one does not get them."""
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
        """Makes later records unknown, since Canary no longer updates them. The manager still has the longer lists, so
        `sending` is still called."""
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
    """One request's KV: the slots to send, by position, from position ``start`` on."""

    request: Any
    start: int
    slots: Tensor


class DecodeSide(StepListener):
    """The decode engine's side, which receives records. ``carried``: whether records may come with the bytes; if not,
    received slots are unknown."""

    def __init__(self, canary: Canary, requests: RequestWriters, carried: bool) -> None:
        REGISTRAR.apply(_decode_hooks(carried, canary.config.on_violation == "protect"))
        self.carried = carried
        self.counts = {"transfers": 0, "imported_transfers": 0}
        # Whether slots before the new ones are sent, too, as for a window or an indexer.
        self._whole = True
        self.canary = canary
        self._requests = requests
        self._buffers = TransferBuffers(canary, canary.slots.empty_buffers) if carried else None
        self._announced: WeakKeyDictionary[Any, _Transfer] = WeakKeyDictionary()
        self._arrived: dict[str, _Transfer] = {}
        self._first: dict[str, _Transfer] = {}
        _SIDES.append(self)

    def registering(self, args: Any) -> None:
        """To be called before a transfer manager registers ``args``: appends the buffers."""
        self._whole = bool(args.state_types)
        if self._buffers is not None:
            self._buffers.append(args)
            _tell_travel(self.canary, "pd decode", self._buffers)

    def allocated(self, request: Any, prefix: Tensor | None, start: int, slots: Tensor) -> None:
        """To be called when slots were allocated for ``request``'s KV from position ``start`` on, before the prefill
        engine gets their numbers: from then on their bytes may change at any time. ``prefix``: slots before them,
        already with KV."""
        if not self.canary.enabled:
            return
        if self._whole and prefix is not None and len(prefix):
            self._expect(prefix.to(slots.device))
        self._expect(slots)
        if slots.is_cuda:
            # This costs nothing: SGLang reads the numbers of these slots on the host next, and waits for them there.
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
        """To be called when ``request``'s KV has arrived, or its transfer has failed."""
        transfer = self._announced.pop(request, None)
        self.counts["transfers"] += 1
        registered = self._buffers is not None and self._buffers.registered
        if transfer is not None and request.finished_reason is None and registered:
            self._arrived = {name: t for name, t in self._arrived.items() if t.request.finished_reason is None}
            self._arrived[request.rid] = transfer

    def begin(self, batch: Any) -> None:
        """Imports the records of requests in their first forward, and compares the bytes."""
        self._first = {}
        if not self._arrived or batch is None or not batch.rids:
            return
        first = [name for name in batch.rids if name in self._arrived]
        self._first = {name: self._arrived.pop(name) for name in first}
        for transfer in self._first.values():
            self._import(transfer, self._buffers.by_region if self._buffers is not None else {})

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """Adds the tokens of these requests, if the view has none."""
        if not self._first or view is None or view.expected_tokens is not None:
            return view
        requests = [self._first[name].request if name in self._first else None for name in batch.rids]
        ends = [0 if request is None else len(request.origin_input_ids) for request in requests]
        return replace(view, expected_tokens=expected_tokens(requests, ends, view.device))

    def flushed(self) -> None:
        """Drops records not yet imported."""
        self._arrived = {}

    def close(self) -> None:
        """Stops following transfers, and tells how many there were."""
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
                # Only the window is sent.
                slots = slots[max(end - guarded.window_tokens + 1 - transfer.start, 0) :]
            own = guarded.slots_of(slots)
            if not len(own):
                continue
            self.canary.slots.import_records(region, own, buffers.payload(own), writer)
            buffers.clear(own)
            self.canary.slots.check(region, own)


def _tell_travel(canary: Canary, what: str, buffers: TransferBuffers) -> None:
    sizes = {region: tables.size_bytes for region, tables in buffers.by_region.items()}
    fields = {"with": what, "carried": buffers.registered, "buffers_bytes": sizes}
    canary.tell(Event("records_travel", "info" if buffers.registered else "warning", fields))


def refusal(regions: Sequence[Region]) -> str | None:
    """Why a decode engine's pool with ``regions`` can't be guarded, None if it can."""
    states = sorted(region.name for region in regions if region.kind is RegionKind.STATE)
    return f"a PD decode engine receives {', '.join(states)} without a forward; not covered yet" if states else None


_SIDES: list[PrefillSide | DecodeSide] = []
"""Open sides of the process, the newest last."""

_MANAGERS: WeakKeyDictionary[Any, PrefillSide | DecodeSide] = WeakKeyDictionary()
"""For each transfer manager the side with entries in its lists."""


def _prefill_hooks() -> dict[str, Hook]:
    return {
        targets.NIXL_MANAGER: (_registering, "BEFORE"),
        targets.NIXL_MEET: (_meeting, "BEFORE"),
        targets.NIXL_SEND: (_sending, "AROUND"),
    }


def _decode_hooks(carried: bool, protects: bool) -> dict[str, Hook]:
    hooks: dict[str, Hook] = {
        targets.PREALLOCATE: (_preallocated, "AFTER"),
        targets.COMMIT: (_committed, "AFTER"),
    }
    if protects:
        hooks[targets.PD_FAIL] = (_failed, "AFTER")
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


def _failed(result: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    reason = disaggregated.failure(request)
    if reason is not None:
        request.finished_reason = schedulers.corrupted(reason)
