"""`SlotEvents`: what happens to slots beside forwards, as the engine's plugin tells it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from canary_core.config import CanaryConfig
from canary_core.ops import payload as payloads
from canary_core.ops.backends import Backend
from canary_core.ops.state import RegionState
from canary_core.records import POSITION, STATES, State
from canary_core.region import KVSource
from canary_core.runtime.event_queue import Change, Changes
from canary_core.runtime.streams import SideStream

Owner = int | Callable[[], int | Tensor]
"""Who frees or is given slots: a writer id, -1 if unknown, or a function that gives it, or an int32 tensor ``[n]`` with
one for each slot. It is called when the event takes effect, on the stream of the forwards."""


class SlotEvents(ABC):
    """The part of `Canary` that engines call where slots change other than by a forward. Each call names a region and
    does nothing for one that is not guarded, or once Canary is off."""

    config: CanaryConfig
    enabled: bool
    _states: dict[str, RegionState]
    _backend: Backend
    _changes: Changes
    _aside: SideStream | None

    @abstractmethod
    def fail(self, where: str, error: Exception) -> None:
        """An exception of ours."""

    def join(self, for_good: bool = False) -> None:
        """The current stream waits for what of ours runs beside the forwards, if anything: before slots, records, or
        tensors of the last forward's batch change. ``for_good``: it is the stream of the forwards."""
        if self._aside is not None:
            self._aside.join(for_good)

    def copy_slots(self, region: str, source: Tensor, destination: Tensor) -> None:
        """The engine copied slots ``source`` to ``destination`` (integer tensors ``[n]``, region slots): records
        travel with the bytes. Call it when the copy was issued, on the same stream. Overlaps are read first; numbers
        that are no slots are left out."""
        state = self._states.get(region)
        if state is not None and self.enabled:
            self.join()
            self._changes.arrive(partial(_copy_records, state, source, destination), source, destination)

    def payload_layout(self, region: str) -> payloads.PayloadLayout | None:
        """What the payloads of `export_slots` mean, for `twin.check_payload`; None in off mode."""
        state = self._states.get(region)
        return None if state is None else payloads.PayloadLayout.of(state)

    def export_slots(self, region: str, slots: Tensor) -> Tensor:
        """What is known of ``slots`` (integer tensor ``[n]``), to travel with their bytes: an int64 payload
        ``[n, payload_layout(region).words]`` on the pool's device, ``[n, 0]`` in off mode. Call it when the bytes are
        read, on the same stream. Any place may keep it; its rows may be cut and joined as the slots are."""
        state = self._states.get(region)
        if state is None:
            return slots.new_empty((slots.shape[0], 0), dtype=torch.int64)
        try:
            if self.enabled:
                self.join()
                self._changes.settle_arrivals()
                return payloads.export_records(state, slots)
        except Exception as error:
            self.fail("export_slots", error)
        return slots.new_zeros((slots.shape[0], payloads.PayloadLayout.of(state).words), dtype=torch.int64)

    def import_slots(self, region: str, slots: Tensor, payload: Tensor, writer: int = -1) -> None:
        """Bytes arrived in ``slots`` (integer tensor ``[n]``, each at most once) with the ``payload`` of the slots they
        come from: rows of `export_slots`, of this Canary or another one, here or in host memory. Slots whose row does
        not fit are not judged until they are written again, as with `forget_slots`. Call it when the transfer was
        issued, on the same stream; a pinned ``payload`` must stay as it is until that stream has read it. ``writer``:
        who is named as the writer of slots that another Canary exported (-1: nobody)."""
        state = self._states.get(region)
        if state is None or not self.enabled:
            return
        try:
            self.join()
            payload = payload.to(slots.device, non_blocking=True)
            self._changes.arrive(partial(payloads.import_records, state, slots, payload, writer), slots, payload)
        except Exception as error:
            self.fail("import_slots", error)

    def expect_slots(self, region: str, slots: Tensor) -> None:
        """Bytes of ``slots`` (integer tensor ``[n]``) will arrive by another way than a forward: what was written there
        is not judged any more. Slots that hold nothing stay so, for events of the allocator that are still to come.

        Unlike the other events it does not wait for those issued before, but takes effect on the current stream at
        once, whatever is in flight on others; the transfer must begin after it. `forget_slots` or `import_slots` must
        follow, in the order of events.
        """
        state = self._states.get(region)
        if state is not None and self.enabled:
            try:
                self.join()
                _expect_bytes(state, slots)
            except Exception as error:
                self.fail("expect_slots", error)

    def check_slots(self, region: str, slots: Tensor) -> None:
        """Compares the bytes of ``slots`` (integer tensor ``[n]``) with their records, on the current stream: right
        after they arrived with records, where the scrub would come by only later. Numbers that are no slots are left
        out. Never captured."""
        state = self._states.get(region)
        if state is None or not self.enabled or not state.sources:
            return
        try:
            self.join()
            self._changes.settle_arrivals()
            self._backend.verify(state, slots)
        except Exception as error:
            self.fail("check_slots", error)

    def forget_slots(self, region: str, slots: Tensor | None) -> None:
        """Bytes of ``slots`` (integer tensor ``[n]``, None for all of the region) arrived without records: not judged
        until written again. Numbers that are no slots are left out."""
        self._mark(region, slots, State.UNKNOWN)

    def clear_slots(self, region: str, slots: Tensor | None) -> None:
        """``slots`` (as in `forget_slots`) hold nothing any more (a roll-back, a reset): reading one before it is
        written is a finding."""
        self._mark(region, slots, State.UNWRITTEN)

    def free_slots(
        self,
        region: str,
        slots: Tensor,
        writer: Owner = -1,
        page_slots: int = 1,
        ready: Sequence[torch.cuda.Event] = (),
    ) -> None:
        """The engine's allocator got ``slots`` back, from request ``writer``. With ``page_slots`` above 1 they number
        pages of so many slots. ``ready``: after which ``slots`` are there; none for what the current stream has to do.

        Events take effect in the order in which the host issues them, before the next forward that it issues: call it
        from any stream; ``slots`` must stay as they are until then. Once slots of a region are freed by events, they
        must be handed out by `alloc_slots` too, until `end_lifetime`.
        """
        self._own(region, slots, writer, ("free", page_slots), ready)

    def alloc_slots(self, region: str, slots: Tensor, writer: Owner = -1, page_slots: int = 1) -> None:
        """The engine's allocator handed ``slots`` out to ``writer``; see `free_slots`."""
        self._own(region, slots, writer, ("alloc", page_slots))

    def tell_later(self, tell: Callable[[], None]) -> None:
        """Events go on that are cheaper told as one. ``tell`` does so: it is called once, before any other event and
        before the next forward, so that the order stays what it was."""
        if self.enabled:
            self._changes.go_on(tell)

    def end_lifetime(self, region: str) -> None:
        """The engine's allocator can't be followed any more: no slot of the region counts as freed from now on."""
        state = self._states.get(region)
        if state is not None and self.enabled:
            self.join()
            self._changes.arrive(partial(_forget_frees, state))

    def rebind(self, region: str, sources: Sequence[KVSource]) -> None:
        """The engine moved the region's bytes to other tensors (a cache that grew): same slots, same records, new
        addresses. Sources must match the old ones in name, size and page size, else `AttachError`. Never captured."""
        state = self._states.get(region)
        if state is not None and self.enabled:
            state.rebind(sources)

    def settle(self) -> None:
        """Lets events that wait for the next forward take effect now, on the current stream, which must be the
        forwards'. Never captured."""
        if self.enabled:
            self.join()
            self._changes.settle()

    def _own(
        self,
        region: str,
        slots: Tensor,
        writer: Owner,
        event: tuple[str, int],
        ready: Sequence[torch.cuda.Event] = (),
    ) -> None:
        state = self._states.get(region)
        if state is None or not self.enabled or not len(slots):
            return
        name, page_slots = event
        op = self._backend.free if name == "free" else self._backend.alloc

        def apply(tensors: list[Tensor]) -> None:
            op(
                state,
                tensors[0] if len(tensors) == 1 else torch.cat(tensors),
                writer() if callable(writer) else writer,
                page_slots,
            )

        key = None if callable(writer) else (region, writer, event)
        self._changes.queue(Change(apply, [slots], list(ready), key=key))

    def _mark(self, region: str, slots: Tensor | None, new: State) -> None:
        state = self._states.get(region)
        if state is None or not self.enabled:
            return
        self.join()
        if slots is None:
            self._changes.arrive(partial(_mark_all, state, new))
        else:
            self._changes.arrive(partial(_mark_records, state, slots, new), slots)


def _copy_records(state: RegionState, source: Tensor, destination: Tensor) -> None:
    payloads.import_records(state, destination, payloads.export_records(state, source))


def _forget_frees(state: RegionState) -> None:
    state.records[:, POSITION] &= ~int(State.FREED)


def _expect_bytes(state: RegionState, slots: Tensor) -> None:
    """What was written becomes unknown, while another stream may be at the same records: freed or not stays as that one
    has it, and whoever reads them sees one or the other."""
    if len(slots):
        _, slot, anything = payloads.entries(state, slots.long())
        words = state.records[:, POSITION]
        word = words[slot]
        written = (word & (int(State.FREED) - 1) == State.WRITTEN) & anything
        # An atomic maximum per slot. The state first: a scrub in flight looks at it once more before it reports.
        unknown = torch.where(written, word + int(State.UNKNOWN - State.WRITTEN), 0)
        words.scatter_reduce_(0, slot, unknown, reduce="amax")
        state.fingerprints[slot] = torch.where(anything, 0, state.fingerprints[slot])


def _mark_all(state: RegionState, new: State) -> None:
    """As `_mark_records`, in place: a list of all slots of a large pool takes gigabytes that nobody has."""
    state.records[:, POSITION].bitwise_and_(-STATES).bitwise_or_(int(new))
    if new is State.UNKNOWN:
        state.fingerprints.zero_()


def _mark_records(state: RegionState, slots: Tensor, new: State) -> None:
    if len(slots):
        _, slot, anything = payloads.entries(state, slots.long())
        word = state.records[slot, POSITION]
        marked = word // STATES * STATES + int(new)
        # The state first: a scrub in flight looks at it once more before it reports.
        state.records[slot, POSITION] = torch.where(anything, marked, word)
        if new is State.UNKNOWN:
            # What the bytes were is no longer known, so the next write can't be judged to have left them as they were.
            state.fingerprints[slot] = torch.where(anything, 0, state.fingerprints[slot])
