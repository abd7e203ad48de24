"""`Ledger`: remembers what this engine stored under each prefix, and judges bytes that come back."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from canary_core.events import Event
from canary_core.ops import arrivals
from canary_core.ops.blocks import BlockShape
from canary_core.ops.payload import PayloadLayout
from canary_core.ops.upload import upload
from canary_core.records import Happened
from canary_core.region import RegionKind
from canary_core.runtime.event_queue import QueuedEvent
from canary_core.runtime.workspace import Switch, Workspace
from canary_core.runtime.writers import Writers
from canary_core.violation import Violation
from canary_core.watchers.audit.running import RunningAudit
from canary_core.watchers.ledger.arrival import Arrival
from canary_core.watchers.ledger.region_ledger import Landed, RegionLedger

KINDS = (RegionKind.FULL, RegionKind.WINDOW)
"""Regions whose slots hold one token each and are written once: what a prefix hash says all about."""

DOUBT_TOLD = (0.1, 0.5)
"""Shares of comparisons left open by doubt, at each of which a ``ledger_doubt`` event is told once."""


class LedgerHost(Protocol):
    """What the ledger needs of its `Canary`."""

    writers: Writers

    @property
    def forwards(self) -> int:
        """How many forwards began."""

    def report(self, violations: Sequence[Violation]) -> int:
        """Tells findings that were made on the host."""


class Slots(Protocol):
    """What the ledger needs of its `SlotEvents`."""

    workspace: Workspace
    audit: RunningAudit

    def fits(self, event: str, region: str, slots: Tensor, page_slots: int) -> bool:
        """Whether the arguments can be right."""

    def expect(self, region: str, slots: Tensor) -> None:
        """Bytes will come for ``slots``."""

    def forget(self, region: str, slots: Tensor | None) -> None:
        """Nothing is known of ``slots`` any more."""


class Ledger:
    """For each complete block of each prefix that this engine computed and gave away: the fingerprints of its bytes,
    source by source, under the prefix hash at its last token. Where bytes come back for such a prefix, whoever brings
    them, they are compared; bytes that are none of those that were stored are an ARRIVAL finding.

    A plugin tells three things: `keep`, of blocks that may be stored outside of the pool, when what they hold is
    complete and before somebody else may write there; `expect`, before bytes come for slots; `arrive`, when they are
    there. `expect` may be left out where no forward runs in between, or reads or writes the slots.

    A difference is a finding only where the ledger is sure to have all that may have been stored under the prefix. It
    is, as long as

    - every block was told to `keep` before it could come back, and after each forward that wrote it again;
    - what was told was known then: tokens, prefix hash and fingerprints of all its slots, else the prefix is in doubt
      (all of the region, where not even the tokens were known, with a ``ledger_blind`` event);
    - no entry of the prefix was evicted, and it has no more than `table.MOST_VARIANTS` different ones;
    - nobody else stores at the `Origin`, see there.

    Else a difference counts as ``unknown``. All of it is told late, as findings of the device are, and never waits.

    Regions of one token a slot are guarded (`KINDS`). With ``CANARY_LEDGER=0``, and without fingerprints
    (``CANARY_BYTES=off``), nothing is kept or compared; slots whose bytes arrive are recorded all the same.
    Calls with arguments that can't be right are refused as in `SlotEvents`. None of them may be captured in a graph.
    """

    def __init__(self, facade: LedgerHost, slots: Slots, switch: Switch) -> None:
        self._facade = facade
        self._slots = slots
        self._switch = switch
        self._workspace = slots.workspace
        self._config = slots.workspace.config
        states = slots.workspace.states
        self._regions: dict[str, RegionLedger] = {}
        able = [name for name, state in states.items() if state.region.kind in KINDS and state.sources]
        self._size_bytes = int(self._config.ledger) // max(len(able), 1)
        self._kept = set(able) if self._config.ledger else set()
        self._able = {name for name, state in states.items() if state.region.kind in KINDS}
        self._expected: dict[Arrival, Tensor] = {}
        self._told_blind: set[str] = set()
        self._told_doubt = 0.0

    def keep(self, region: str, slots: Tensor, page_slots: int) -> None:
        """``slots`` (integer ``[n]``, on the pool's device) list complete blocks of ``page_slots`` slots, one after the
        other, each in the order of its sequence, that hold KV which may leave the pool: a connector stores them, the
        prefix cache takes them in. Slots beyond the last complete block are left out.

        Call it after the forward that completed them, before the next; it takes effect with the events of
        `Canary.slots`, in their order. To tell a block again is harmless. What the records know of the blocks is taken,
        no byte is read.
        """
        if self._switch.enabled and self._told("keep", region, slots, page_slots):
            self._keep(region, slots, page_slots, False)

    def keep_pages(self, region: str, pages: Tensor, page_slots: int) -> None:
        """As `keep`, for blocks that are pages of the pool, by their numbers: integer ``[n]``; page ``p`` has the slots
        from ``p * page_slots`` on, in the order of a sequence."""
        if self._switch.enabled and self._told("keep_pages", region, pages, page_slots):
            self._keep(region, pages, page_slots, True)

    def expect(self, arrival: Arrival) -> None:
        """The bytes of ``arrival`` will come. From now on its slots hold its tokens, so forwards that read them are
        checked and the sequence goes on from there; their bytes are judged when they have come. The transfer must begin
        after this call. `arrive` must follow with the same object, or `give_up`."""
        if not self._switch.enabled or not self._fits("expect", arrival):
            return
        region, state = arrival.region, self._slots.workspace.states[arrival.region]
        self._slots.expect(region, arrival.slots)
        with self._switch.guard("ledger.expect"):
            rows = self._rows(arrival)
            self._expected[arrival] = rows
            ledger = self._ledger(region, arrival.page_slots)
            if ledger is not None:
                ledger.expect(arrival)
            apply = partial(arrivals.expect, state, arrival.slots, rows, arrival.writer)
            self._workspace.queue.put_arrival(apply, arrival.slots, rows)

    def arrive(self, arrival: Arrival, ready: Sequence[torch.cuda.Event] = ()) -> None:
        """The bytes of ``arrival`` are there, for work on the current stream, which must be the forwards', or after the
        events ``ready``. They are fingerprinted, so that the scrub watches them from now on, and their complete blocks
        are compared, but for those to which a forward has written since the arrival was expected. If it was not, no
        forward may have been issued since the transfer began, but one that was checked and is not recorded yet.

        It takes effect at once, or where events wait for the next forward, after those; `SlotEvents.settle` ends the
        wait. Until then nothing else may write to the slots."""
        if not self._switch.enabled or not self._fits("arrive", arrival):
            return
        rows = self._expected.pop(arrival, None)
        self._slots.audit.claim(arrival.region, arrival.slots, arriving=False)
        with self._switch.guard("ledger.arrive"):
            self._workspace.join()
            request = self._facade.writers.name(arrival.writer)
            landed = Landed(arrival, rows is not None, self._facade.forwards, request)
            if rows is None:
                rows = self._rows(arrival)
            apply = partial(self._land, landed, rows, tuple(ready))
            self._workspace.queue.put_arrival(apply, arrival.slots, rows)

    def give_up(self, arrival: Arrival) -> None:
        """The bytes of ``arrival``, which was expected, will not come, or nobody knows what came: its slots are not
        judged until they are written again."""
        if self._expected.pop(arrival, None) is not None:
            ledger = self._regions.get(arrival.region)
            if ledger is not None:
                ledger.give_up(arrival)
            self._slots.forget(arrival.region, arrival.slots)

    def export(self, region: str, page_slots: int, hashes: Iterable[int] | None = None) -> bytes:
        """The entries of ``hashes`` (None: all), to be imported by the ledger of an engine that gets the bytes. Of
        prefixes that are in doubt the other side is told so. What was kept before is among them: waits for the device.
        Empty where nothing is kept."""
        ledger = self._ledger(region, page_slots) if self._switch.enabled else None
        if ledger is None:
            return b""
        self.read(wait=True)
        return ledger.export(hashes, self._config.rank)

    def import_entries(self, region: str, page_slots: int, data: bytes | bytearray | memoryview) -> int:
        """Enters what the ledger of a peer exported: an engine whose bytes come here, with the same model, sources,
        block size and rank. Call it before the bytes arrive. Gives how many entries there were. Raises `AttachError`
        where they don't fit."""
        ledger = self._ledger(region, page_slots) if self._switch.enabled else None
        return ledger.import_entries(data, self._config.rank) if ledger is not None and len(data) else 0

    def send(self) -> None:
        """Starts the copy of what was gathered, on the current stream, which must be that of the forwards or come after
        it. Never waits, never captured."""
        for ledger in self._regions.values():
            ledger.send()

    def read(self, wait: bool = False) -> None:
        """Enters and judges what has come to the host, and reports what is wrong. ``wait``: all that was told so far,
        which waits for the device."""
        if wait:
            self._workspace.join()
            self._workspace.queue.settle()
            self.send()
        for name, ledger in self._regions.items():
            found, shared = ledger.read(wait)
            for origin in shared:
                reason = (
                    f"{origin.name} brought a prefix that this engine never kept, so others store there too, or it "
                    "stored something that canary.ledger.keep was not told; a difference proves nothing any more and "
                    "counts as ledger_unknown"
                )
                self._switch.tell(Event("ledger_shared", "warning", {"origin": origin.name, "reason": reason}))
            if ledger.table.doubt.everything and name not in self._told_blind:
                self._told_blind.add(name)
                reason = (
                    "blocks were kept of which not even the tokens are known (slots that no forward has written, or "
                    "whose bytes arrived unrecorded), so nobody can say what may be stored; a difference proves "
                    "nothing any more and counts as ledger_unknown"
                )
                self._switch.tell(Event("ledger_blind", "warning", {"region": name, "reason": reason}))
            self._facade.report([replace(violation, rank=self._config.rank) for violation in found])
            self._tell_doubt(name, ledger)

    @property
    def doubt_ratio(self) -> float | None:
        """The largest share of comparisons that doubt leaves open in a region, see `RegionLedger.doubt_ratio`; None
        where nothing was kept or came back."""
        return max((ledger.doubt_ratio for ledger in self._regions.values()), default=None)

    def stats(self) -> dict[str, float]:
        """Of all regions: ``ledger_entries``, their ``ledger_bytes`` of host memory, and how many were ``evicted``; of
        the blocks that left, how many were ``kept`` or ``imported``, and of how many not all was known (``unclear``);
        of those that came back, how many were ``compared`` with an entry, ``matched``, ``differing``, ``lossy``,
        ``unknown`` (nothing to compare with, or more may have been stored), ``rewritten`` (a forward wrote there before
        they could be read) and ``unjudged`` (their prefix can't be known); and ``partial`` ones. All begin with
        ``ledger_``. What is zero is left out. ``ledger_doubt_ratio`` is `doubt_ratio`."""
        found: dict[str, float] = {}
        for ledger in self._regions.values():
            table = ledger.table
            numbers = {"entries": table.entries, "bytes": table.size_bytes, "evicted": table.evicted, **ledger.counts}
            numbers.pop("stranger", None)
            for name, number in numbers.items():
                if number:
                    found[f"ledger_{name}"] = found.get(f"ledger_{name}", 0) + number
        ratio = self.doubt_ratio
        if ratio:
            found["ledger_doubt_ratio"] = round(ratio, 4)
        return found

    def _tell_doubt(self, region: str, ledger: RegionLedger) -> None:
        """Tells once for each of `DOUBT_TOLD` that so much can't be judged any more."""
        ratio = ledger.doubt_ratio
        passed = max((share for share in DOUBT_TOLD if ratio >= share), default=0.0)
        if passed <= self._told_doubt or ledger.table.doubt.everything:
            return
        self._told_doubt = passed
        reason = (
            f"{ratio:.0%} of the KV that comes back can't be judged: the ledger has evicted {ledger.table.evicted} "
            "blocks and can't tell any more which prefixes these were of, so a difference counts as ledger_unknown; "
            f"set CANARY_LEDGER to more than {int(self._config.ledger)} bytes, and restart the engine to begin anew"
        )
        fields = {"region": region, "ratio": round(ratio, 4), "evicted": ledger.table.evicted, "reason": reason}
        self._switch.tell(Event("ledger_doubt", "warning", fields))

    def _keep(self, region: str, slots: Tensor, page_slots: int, paged: bool) -> None:
        ledger = self._ledger(region, page_slots)
        if ledger is None:
            return
        block = BlockShape(page_slots, paged)
        count = block.numbers(block.blocks(len(slots)))
        ledger.counts["partial"] += count < len(slots)
        if count:
            with self._switch.guard("ledger.keep"):
                every = slots if count == len(slots) else slots[:count]
                event = QueuedEvent(partial(_gather, ledger, paged), [every], key=("ledger.keep", region, paged))
                self._workspace.queue.put(event)

    def _ledger(self, region: str, page_slots: int) -> RegionLedger | None:
        """None where nothing is kept: it is off, or ``region`` is none of its."""
        if region not in self._kept:
            return None
        ledger = self._regions.get(region)
        if ledger is None:
            state = self._workspace.states[region]
            ledger = RegionLedger(state, self._workspace.backend, page_slots, self._size_bytes)
            self._regions[region] = ledger
        if ledger.page_slots != page_slots:
            self._switch.misuse(
                f"ledger: region {region!r} has blocks of {ledger.page_slots} slots, got page_slots={page_slots}; a "
                "region has one size of blocks",
                ("ledger", region, "page_slots"),
            )
            return None
        return ledger

    def _land(self, landed: Landed, rows: Tensor, ready: Sequence[torch.cuda.Event]) -> None:
        for event in ready:
            event.wait()
        arrival = landed.arrival
        ledger = self._ledger(arrival.region, arrival.page_slots)
        state = self._workspace.states[arrival.region]
        if ledger is not None:
            ledger.land(landed, rows)
            return
        if not landed.expected:
            arrivals.expect(state, arrival.slots, rows, arrival.writer)
        self._workspace.backend.note(state, arrival.slots, Happened.ARRIVE, arrival.writer)
        if state.sources:
            mine = arrivals.still_expected(state, arrival.slots, rows)
            self._workspace.backend.adopt(state, torch.where(mine, arrival.slots, -1))

    def _rows(self, arrival: Arrival) -> Tensor:
        """What its slots get as records, on the device. Never waits for it."""
        blocks = arrival.blocks
        layout = PayloadLayout.of(self._workspace.states[arrival.region])
        rows = arrivals.sequence_rows(layout, blocks.tokens, blocks.first, blocks.hashes)
        return upload(rows, self._workspace.device)

    def _fits(self, event: str, arrival: Arrival) -> bool:
        return self._told(event, arrival.region, arrival.slots, arrival.page_slots)

    def _told(self, event: str, region: str, slots: Tensor, page_slots: int) -> bool:
        """Whether the arguments can be right. Tells what is wrong."""
        if not self._slots.fits(f"ledger.{event}", region, slots, page_slots):
            return False
        if region not in self._able:
            self._switch.misuse(
                f"ledger.{event}: region {region!r} is none of {', '.join(sorted(self._able)) or 'no regions'}, the "
                "full and window regions of one token a slot; call slots.forget for it",
                (f"ledger.{event}", region, "kind"),
            )
            return False
        return True


def _gather(ledger: RegionLedger, paged: bool, tensors: list[Tensor]) -> None:
    ledger.gather(tensors[0] if len(tensors) == 1 else torch.cat(tensors), paged)
