"""`SlotEvents`: changes of slots beside forwards, reported by the engine's plugin."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from canary_core.errors import AttachError
from canary_core.guard.slot_arguments import SlotArguments
from canary_core.ops import contents
from canary_core.ops.state import RegionState
from canary_core.records import CONTENT, POSITION, STEP_WRITTEN, TOKEN, UNPARKED, State
from canary_core.region import KVSource, Placement
from canary_core.runtime.event_queue import QueuedEvent
from canary_core.runtime.streams import capturing
from canary_core.runtime.workspace import Switch, Workspace
from canary_core.watchers.audit.running import RunningAudit

if TYPE_CHECKING:
    from canary_core.ops.payload import PayloadLayout
    from canary_core.ops.record_buffers import RecordBuffers

Owner = int | Callable[[], int | Tensor]
"""New or former owner of slots: a writer id, -1 if unknown, or a function that returns one, or an int32 tensor ``[n]``
with one for each slot. Called when the event takes effect, on the stream of the forwards."""

Ready = Sequence[torch.cuda.Event]
"""Events after which slots are there; none for the current stream's present work."""

Ownership = Literal["alloc", "park", "share", "evict", "free"]
"""Changes of ownership; also the names of the back ends' ops."""

KEEPING = ("alloc", "park", "share")
"""Events that make no further slot free to be handed out."""


class SlotEvents:
    """Calls of an engine's plugin for changes of slots other than by a forward. Each call names a region of
    `Canary.regions`, and does nothing once Canary is off. Slots are integer tensors ``[n]`` on the pool's device, of
    the region's slots; numbers beyond the region are left out.

    A call with impossible arguments (an unknown region, a list, floats, another device, ...) is refused: it has no
    effect, and a ``misuse`` event names the remedy, once for each sort. In raise mode it is a `MisuseError`. Only facts
    known to the host are checked: no call waits for the device. In log mode an exception of Canary's own switches
    Canary off and goes no further; in raise mode it passes.
    """

    def __init__(self, workspace: Workspace, switch: Switch, audit: RunningAudit) -> None:
        self.workspace = workspace
        self.audit = audit
        """The audit: slots changed by these calls are no surprise to it."""
        self._switch = switch
        self._states = workspace.states
        self._given = SlotArguments(workspace.states, workspace.device, switch)
        self._queue = workspace.queue
        self.counts: dict[str, dict[str, int]] = {region: {} for region in self._states}
        """How many events of each kind were told of each region; each call is one."""

    def alloc(self, region: str, slots: Tensor, writer: Owner = -1, page_slots: int = 1) -> None:
        """The engine's allocator handed ``slots`` out to request ``writer``. With ``page_slots`` above 1 they number
        pages of so many slots. A slot in use or parked is a DOUBLE_ALLOC finding.

        Events take effect in the order issued by the host, before the next forward it issues: call from any stream;
        ``slots`` must stay unchanged until then. An engine reports all of a region's life or nothing: slots freed by
        events must be handed out by `alloc`, and slots given up by the prefix cache with `evict` must have been parked,
        until `end_lifetime`. Slots without an event are not judged.
        """
        self._put_owned(("alloc", region, page_slots), slots, writer)

    def park(self, region: str, slots: Tensor, writer: Owner = -1, page_slots: int = 1, ready: Ready = ()) -> None:
        """The last request, ``writer``, let go of ``slots``, and the prefix cache keeps them; see `alloc`. Reading them
        is legal; a forward's write makes them held again. Slots already parked or free are a DOUBLE_FREE finding.
        """
        self._put_owned(("park", region, page_slots), slots, writer, ready)

    def share(self, region: str, slots: Tensor, writer: Owner = -1, page_slots: int = 1, ready: Ready = ()) -> None:
        """Request ``writer`` takes ``slots`` from the prefix cache, a prefix hit; see `alloc`. They are no longer
        parked; for slots of another request the call is harmless. Free slots are a FREED finding."""
        self._put_owned(("share", region, page_slots), slots, writer, ready)

    def evict(self, region: str, slots: Tensor, writer: Owner = -1, page_slots: int = 1, ready: Ready = ()) -> None:
        """The prefix cache gave ``slots`` up: they are free; see `alloc`. Slots handed out or written since they were
        parked are an EVICTED_IN_USE finding, slots already free a DOUBLE_FREE."""
        self._put_owned(("evict", region, page_slots), slots, writer, ready)

    def free(self, region: str, slots: Tensor, writer: Owner = -1, page_slots: int = 1, ready: Ready = ()) -> None:
        """The engine's allocator got ``slots`` back from request ``writer``, and no prefix cache keeps them; see
        `alloc`. Slots already parked or free are a DOUBLE_FREE finding."""
        self._put_owned(("free", region, page_slots), slots, writer, ready)

    def report(self, events: Sequence[tuple[tuple[Ownership, str, int], Tensor, Owner]]) -> None:
        """Several changes of ownership in order, each as by the method of its name, at a fraction of the cost: name,
        region and ``page_slots``; slots; writer. Slots are parts of one tensor, made on the current stream, to which
        nobody writes any more."""
        if not events or self._owned(*events[0], counts=False) is None:
            return
        queued = []
        for about, slots, writer in events:
            event, region, page_slots = about
            state = self._states.get(region) or self._given.region(event, region)
            if state is not None:
                self._count(event, region)
            if state is not None and len(slots):
                self.workspace.journal.keep(event, region, slots, writer, page_slots)
                queued.append(self._queued(state, about, slots, writer))
        if queued:
            with self._switch.guard("slots.report"):
                self._queue.put(*queued)

    def defer(self, tell: Callable[[], None]) -> None:
        """For events cheaper to report as one. ``tell`` reports them: called once, before any other event and before
        the next forward, so that the order stays the same."""
        if self._switch.enabled:
            self._queue.defer(tell)

    def end_lifetime(self, region: str) -> None:
        """The engine's allocator can't be followed any more: no slot of the region counts as freed or parked from now
        on."""
        state = self._told("end_lifetime", region)
        if state is not None:
            with self._switch.guard("slots.end_lifetime"):
                self.workspace.join()
                self._queue.put_arrival(partial(contents.forget_releases, state))

    def copy(self, region: str, source: Tensor, destination: Tensor, check: bool = False) -> None:
        """The engine copied slots ``source`` to ``destination``: records and fingerprints travel with the bytes. So a
        wrong copy is found like any other change, and ``destination`` is never taken for right as it is. Call once the
        copy was issued, on the same stream. Overlaps are read first.

        ``check``: compares the bytes of ``destination`` at once, in one more launch, instead of later by the scrub: for
        few slots, on the stream of the forwards. Not during a graph capture, or while events of the allocator still
        wait.
        """
        state = self._told("copy", region, source=source, destination=destination)
        if state is not None:
            self.audit.claim(region, destination)
            with self._switch.guard("slots.copy"):
                self.workspace.join()
                apply = partial(contents.copy, self.workspace.backend, state, source, destination)
                self._queue.put_arrival(apply, source, destination)
                if check and state.readable and not len(self._queue) and not capturing(self.workspace.device):
                    self.workspace.backend.verify(state, destination, 1)

    def clear(self, region: str, slots: Tensor | None) -> None:
        """``slots`` (None: all of the region) hold nothing any more (a roll-back, a reset): reading one before it is
        written is a finding."""
        self._mark(region, slots, State.UNWRITTEN)

    def forget(self, region: str, slots: Tensor | None) -> None:
        """Bytes of ``slots`` (None: all of the region) arrived without records: not judged until written again."""
        self._mark(region, slots, State.UNKNOWN)

    def forget_bytes(self, region: str, slots: Tensor) -> None:
        """Makes the bytes of ``slots`` unknown; the records stay. Takes effect on the current stream at once, without a
        wait for the device."""
        self._fingerprint("forget_bytes", region, slots, lambda state: 0)

    def adopt_bytes(self, region: str, slots: Tensor) -> None:
        """Takes the present bytes of ``slots``, empty and just handed out, as their fingerprint; they are bytes of
        another region in the same memory: a write that leaves them unchanged is lost. One look at the bytes, in the
        order of events; numbers beyond the region are left out. Not for slots to be read: their present bytes would
        count as right."""
        state = self._told("adopt_bytes", region, slots=slots)
        if state is not None and state.readable and len(slots):
            with self._switch.guard("slots.adopt_bytes"):
                self.workspace.join()
                self._queue.put_arrival(partial(self.workspace.backend.adopt, state, slots), slots)

    def expect_zeros(self, region: str, slots: Tensor) -> None:
        """All bytes of ``slots`` are zero: a write that leaves them so is lost. Takes effect on the current stream at
        once; numbers beyond the region are left out."""
        # The fingerprint of zero bytes is the salt alone.
        self._fingerprint("expect_zeros", region, slots, lambda state: state.sources.zeros)

    def _fingerprint(
        self, event: str, region: str, slots: Tensor, value: Callable[[RegionState], Tensor | int]
    ) -> None:
        """``slots`` have the fingerprints ``value`` from now on, in each of the region's sources."""
        state = self._told(event, region, slots=slots)
        if state is not None and len(slots):
            with self._switch.guard(event):
                self.audit.claim(region, slots)
                _, slot, anything = state.entries(slots.long())
                state.fingerprints[slot] = torch.where(anything, value(state), state.fingerprints[slot])

    def expect(self, region: str, slots: Tensor) -> None:
        """Bytes of ``slots`` will arrive by another way than a forward: written slots are no longer judged. Empty slots
        stay empty, for events of the allocator still to come.

        Unlike the other events, takes effect on the current stream at once, without waiting for earlier events,
        whatever is in flight on others; the transfer must begin afterwards. `forget` or `import_records` must follow,
        in the order of events.
        """
        state = self._told("expect", region, slots=slots)
        if state is not None:
            self.audit.claim(region, slots, arriving=True)
            with self._switch.guard("slots.expect"):
                self.workspace.join()
                contents.expect(state, slots)

    def check(self, region: str, slots: Tensor, page_slots: int = 1) -> None:
        """Compares the bytes of ``slots`` with their records, on the current stream: right after an arrival with
        records, or for a prefix hit, instead of later by the scrub. With ``page_slots`` above 1 they number pages of so
        many slots. Never captured."""
        state = self._told("check", region, page_slots, slots=slots)
        if state is not None and state.readable:
            with self._switch.guard("slots.check"):
                self.workspace.join()
                self._queue.settle_arrivals()
                self.workspace.backend.verify(state, slots, page_slots)

    def expect_prefix(self, region: str, source: str, slots: Tensor, lengths: Tensor, writers: Tensor) -> None:
        """Before a forward, for requests new to ``region``, which keeps one slot of each sequence (a reused recurrent
        state): each must read there the sequence whose last token region ``source`` has in ``slots``, else there is a
        PREFIX finding. ``lengths``, ``writers``: integer ``[rows]``, prefix length and writer of each row. Rows without
        a sure record in ``source`` are not judged. Never captured."""
        other = self._state(source, "expect_prefix")
        state = self._told("expect_prefix", region, slots=slots, lengths=lengths, writers=writers)
        if state is not None and other is not None:
            from canary_core.ops import cross_region

            cross_region.expect_sequences(state, other, slots, lengths=lengths, writers=writers)

    def payload_layout(self, region: str) -> "PayloadLayout | None":
        """Meaning of the payloads of `export_records`, for `check_payload`; None in off mode."""
        from canary_core.ops.payload import PayloadLayout

        state = self._given.region("payload_layout", region)
        return None if state is None else PayloadLayout.of(state)

    def export_records(self, region: str, slots: Tensor, settle: bool = True) -> Tensor:
        """Payload of ``slots``, to travel with their bytes: int64 ``[n, payload_layout(region).words]`` on the pool's
        device, ``[n, 0]`` in off mode and for a refused call. Call when the bytes are read, on the same stream. Any
        place may keep the payload; rows may be cut and joined like the slots.

        ``settle``: waiting events that change the content of slots take effect before. Set to False on another stream
        than the forwards', and only if no such event concerns ``slots``.
        """
        from canary_core.ops.payload import PayloadLayout, export_records

        state = self._given.region("export_records", region)
        if state is None or not self._given.fit("export_records", region, slots=slots):
            rows = slots.shape[0] if isinstance(slots, Tensor) and slots.dim() else 0
            return torch.empty((rows, 0), dtype=torch.int64, device=self.workspace.device)
        if self._switch.enabled:
            with self._switch.guard("slots.export_records"):
                if settle:
                    self.workspace.join()
                    self._queue.settle_arrivals()
                return export_records(state, slots)
        return slots.new_zeros((slots.shape[0], PayloadLayout.of(state).words), dtype=torch.int64)

    def import_records(self, region: str, slots: Tensor, rows: Tensor, writer: int = -1) -> None:
        """Bytes arrived in ``slots`` (each at most once) with the payload ``rows`` of their source slots: rows of
        `export_records`, of this Canary or another one, here or in host memory. Slots with an unfitting row are not
        judged until rewritten, as with `forget`. Call once the transfer was issued, on the same stream; pinned ``rows``
        must stay unchanged until the stream has read them. ``writer``: named as the writer of slots exported by another
        Canary (-1: nobody)."""
        state = self._state(region, "import_records")
        if state is not None and self._given.payload_fits(region, slots, rows):
            self._count("import_records", region)
            self.workspace.journal.note("import_records", region, {"slots": slots}, writer)
            self.audit.claim(region, slots, arriving=False)
            with self._switch.guard("slots.import_records"):
                self.workspace.join()
                rows = rows.to(slots.device, non_blocking=True)
                apply = partial(contents.import_records, self.workspace.backend, state, slots, rows, writer)
                self._queue.put_arrival(apply, slots, rows)

    def record_buffers(self, region: str) -> "RecordBuffers":
        """Records of all slots of ``region``, as tables that a transfer engine can send beside the KV. They are this
        Canary's own, live tables: not to be written to, except the stamps. Raises `AttachError` for an unguarded
        region."""
        from canary_core.ops.record_buffers import RecordBuffers

        return RecordBuffers.of(self._require(region))

    def empty_buffers(self, region: str) -> "RecordBuffers":
        """Empty tables of the same shape, to receive such rows. Raises `AttachError` for an unguarded region."""
        from canary_core.ops.record_buffers import RecordBuffers

        return RecordBuffers.inbox(self._require(region))

    def carry_over(self, old: "SlotEvents", region: str, source: Tensor, destination: Tensor) -> None:
        """Takes over from another Canary with the events ``old``: its records of the region's slots ``source`` become
        the records of ``destination``; step number and sequences of requests go on. On the current stream at once."""
        state = self._told("carry_over", region, source=source, destination=destination)
        before = old._states.get(region)
        if state is not None and before is not None:
            contents.carry_over(state, before, source, destination)

    def rebind(self, region: str, sources: Sequence[KVSource]) -> None:
        """The engine moved the region's bytes to other tensors (a cache that grew): same slots, same records, new
        addresses. Sources must match the old ones in name, size and page size, else `AttachError`. Never captured."""
        state = self._state(region, "rebind")
        if state is not None:
            state.rebind(sources)
            self.audit.rebind(region, sources)

    def rebind_alike(self, region: str, tensors: Sequence[Tensor], places: Sequence[Placement]) -> bool:
        """As `rebind`, for a cache made anew by every forward, at a fraction of the cost: source ``i`` of the region
        moves to ``tensors[i]``, laid out as ``places[i % len(places)]``. Returns whether the move was made: only with
        tensors of one shape, strides and type for each place, all aligned to 16 bytes, and sources that differ from
        others of the same place in name and tensor only. False: nothing has changed; call `rebind`."""
        state = self._state(region, "rebind")
        if state is None:
            return True
        return not self.audit.follows_sources and state.rebind_alike(tensors, places)

    def let_go(self, region: str) -> None:
        """The forward of the last `Step.before` will give up the region's tensors. Canary releases them, so that their
        memory is free as early as without Canary, and reads none until the next `rebind`, which must come before
        `Step.after`. For a cache made anew by every forward, checked on the forward's own stream (`Overlap.NONE`). Does
        nothing during an audit. Never captured."""
        # One that an error has switched off keeps nothing either.
        state = self._given.region("let_go", region)
        if state is not None and not self.audit.follows_sources:
            state.sources.let_go()

    def still_holds(self, region: str, slot: int, step: int) -> bool:
        """Whether ``slot`` still holds the write of forward ``step``. Reads the device and waits for it."""
        state = self._given.region("still_holds", region)
        if state is None:
            return False
        self.workspace.join()
        record: list[int] = state.records[slot].tolist()
        return record[STEP_WRITTEN] == step and record[POSITION] & UNPARKED == State.WRITTEN

    def tokens(self, region: str, slots: Tensor) -> Tensor:
        """Token of each of ``slots`` (int64 ``[n]``, slots of the region) by its record, int64 ``[n]``; -1 where none
        is on record as written, or the token is not known. Between forwards, on their stream; never captured."""
        state = self._state(region, "tokens")
        if state is None:
            return torch.full_like(slots, -1)
        self.settle()
        record = state.records[slots]
        written = record[:, POSITION] & (CONTENT | State.FREED) == State.WRITTEN
        return torch.where(written, record[:, TOKEN].long(), -1)

    def settle(self) -> None:
        """Applies events waiting for the next forward now, on the current stream, which must be the forwards'. Never
        captured."""
        if self._switch.enabled:
            with self._switch.guard("slots.settle"):
                self.workspace.join()
                self._queue.settle()

    def _state(self, region: str, event: str) -> RegionState | None:
        """The region's state; None where there is nothing to do: Canary is off, or the region of ``event`` is not
        guarded."""
        if self._switch.put_off is not None:
            self._switch.put_off()
        return self._given.region(event, region) if self._switch.enabled else None

    def _told(self, event: str, region: str, page_slots: int = 1, **slots: Tensor) -> RegionState | None:
        """As `_state`, for an event about ``slots``, by argument name, or pages of ``page_slots``; counts the event.
        None, too, if they can't be slots."""
        state = self._state(region, event)
        given = self._given
        if state is None or not (given.fit(event, region, **slots) and given.pages(event, region, page_slots)):
            return None
        self._count(event, region)
        self.workspace.journal.note(event, region, slots, page=page_slots)
        return state

    def fits(self, event: str, region: str, slots: Tensor, page_slots: int) -> bool:
        """For events of other rooms, by name: whether ``region`` is guarded and the other arguments can be its slots
        and a number of slots. Reports misuse."""
        state = self._state(region, event)
        return (
            state is not None
            and self._given.fit(event, region, slots=slots)
            and self._given.pages(event, region, page_slots)
        )

    def _owned(
        self, about: tuple[str, str, int], slots: Tensor, writer: Owner, counts: bool = True
    ) -> RegionState | None:
        """As `_told`, for an event of the allocator: ``about`` is event, region, and slots of a page."""
        event, region, page_slots = about
        state = self._state(region, event)
        if state is None or not self._given.fit(event, region, slots=slots):
            return None
        if not (self._given.pages(event, region, page_slots) and self._given.owner(event, region, writer)):
            return None
        if counts:
            self._count(event, region)
        return state

    def _count(self, event: str, region: str) -> None:
        counts = self.counts[region]
        counts[event] = counts.get(event, 0) + 1

    def _require(self, region: str) -> RegionState:
        state = self._states.get(region)
        if state is None:
            raise AttachError(f"no region {region!r} is guarded; there are {', '.join(self._states) or 'none'}")
        return state

    def _put_owned(self, about: tuple[Ownership, str, int], slots: Tensor, writer: Owner, ready: Ready = ()) -> None:
        state = self._owned(about, slots, writer)
        if state is not None and len(slots):
            self.workspace.journal.note(about[0], about[1], {"slots": slots}, writer, about[2])
            with self._switch.guard(about[0]):
                self._queue.put(self._queued(state, about, slots, writer, ready))

    def _queued(
        self, state: RegionState, about: tuple[Ownership, str, int], slots: Tensor, writer: Owner, ready: Ready = ()
    ) -> QueuedEvent:
        event, _, page_slots = about
        apply = partial(_apply, getattr(self.workspace.backend, event), state, writer, page_slots)
        key = None if callable(writer) else (*about, writer)
        return QueuedEvent(apply, [slots], list(ready), key=key, frees=event not in KEEPING)

    def _mark(self, region: str, slots: Tensor | None, new: State) -> None:
        event = "forget" if new is State.UNKNOWN else "clear"
        state = self._told(event, region, 1, **({} if slots is None else {"slots": slots}))
        if state is None:
            return
        self.audit.claim(region, slots, arriving=False)
        with self._switch.guard(event):
            self.workspace.join()
            if slots is None:
                self._queue.put_arrival(partial(contents.mark_all, state, new))
            else:
                self._queue.put_arrival(partial(contents.mark, self.workspace.backend, state, slots, new), slots)


def _apply(op: Callable[..., None], state: RegionState, writer: Owner, page_slots: int, tensors: list[Tensor]) -> None:
    every = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    op(state, every, writer() if callable(writer) else writer, page_slots)
