"""`Ledger`: keeps fingerprints of stored KV under each prefix, and judges bytes that come back."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from canary_core.events import Event
from canary_core.ops import arrivals
from canary_core.ops.blocks import BlockShape
from canary_core.ops.fingerprint_keys import other_keys
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
"""Regions of one token a slot, written once: the prefix hash determines the content."""

DOUBT_TOLD = (0.1, 0.5)
"""Shares of comparisons left open by doubt, each reported once by a ``ledger_doubt`` event."""


class LedgerHost(Protocol):
    """The part of `Canary` used by the ledger."""

    writers: Writers

    @property
    def forwards(self) -> int:
        """How many forwards began."""

    def report(self, violations: Sequence[Violation]) -> int:
        """Reports findings made on the host."""


class Slots(Protocol):
    """The part of `SlotEvents` used by the ledger."""

    workspace: Workspace
    audit: RunningAudit

    def fits(self, event: str, region: str, slots: Tensor, page_slots: int) -> bool:
        """Whether the arguments can be right."""

    def expect(self, region: str, slots: Tensor) -> None:
        """Bytes will come for ``slots``."""

    def forget(self, region: str, slots: Tensor | None) -> None:
        """Nothing is known of ``slots`` any more."""


class Ledger:
    """For each complete block of each prefix computed and given away by this engine: the fingerprints of its bytes,
    source by source, under the prefix hash at its last token. Bytes that come back for such a prefix, from anywhere,
    are compared; bytes unlike all the stored ones are an ARRIVAL finding.

    A plugin makes three calls: `keep`, for blocks that may be stored outside of the pool, once their content is
    complete and before somebody else may write there; `expect`, before bytes come for slots; `arrive`, when they are
    there. `expect` may be left out where no forward runs in between, or reads or writes the slots.

    A difference is a finding only where the ledger is sure to have everything possibly stored under the prefix, that
    is, as long as

    - `keep` was called for every block before it could come back, and after each forward that rewrote it;
    - tokens, prefix hash and fingerprints of all slots were known at the call, else the prefix is in doubt (or the
      whole region, if not even the tokens were known, with a ``ledger_blind`` event);
    - no entry of the prefix was evicted, and it has at most `table.MOST_VARIANTS` different ones;
    - nobody else stores at the `Origin`, see there.

    Otherwise a difference counts as ``unknown``. All findings come late, like the device's, and never wait.

    Regions of one token a slot are guarded (`KINDS`). With ``CANARY_LEDGER=0``, and without fingerprints
    (``CANARY_BYTES=off``), nothing is kept or compared; arriving slots are recorded all the same. Calls with impossible
    arguments are refused as in `SlotEvents`. No method may be captured in a graph.
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
        self._told_keys = False
        self.shared: list[str] = []
        """Names of the origins told by ``ledger_shared`` events, in order."""

    def keep(self, region: str, slots: Tensor, page_slots: int) -> None:
        """Keeps the complete blocks of ``page_slots`` slots listed in ``slots`` (integer ``[n]``, on the pool's
        device), block after block, each in the order of its sequence: KV that may leave the pool, because a connector
        stores it or the prefix cache takes it in. Slots beyond the last complete block are left out.

        Call after the forward that completed the blocks, before the next; takes effect with the events of
        `Canary.slots`, in their order. Keeping a block again is harmless. Reads the blocks' records, and no bytes.
        """
        if self._switch.enabled and self._told("keep", region, slots, page_slots):
            self._keep(region, slots, page_slots, False)

    def keep_pages(self, region: str, pages: Tensor, page_slots: int) -> None:
        """As `keep`, for blocks that are pages of the pool, by number: integer ``[n]``; page ``p`` has the slots from
        ``p * page_slots`` on, in the order of a sequence."""
        if self._switch.enabled and self._told("keep_pages", region, pages, page_slots):
            self._keep(region, pages, page_slots, True)

    def remember(self, region: str, slots: Tensor, page_slots: int) -> None:
        """Bytes will come for ``slots`` (integer ``[n]``, complete blocks of ``page_slots`` slots, as of `keep`): the
        records of the present content are remembered, so that an arrival that leaves it there is found. Part of
        `expect`; a call of its own where slots are forgotten earlier (`SlotEvents.forget`), and then before. Reads the
        records at once, on the current stream, and no bytes."""
        if self._switch.enabled and len(slots) and self._told("remember", region, slots, page_slots):
            with self._switch.guard("ledger.remember"):
                ledger = self._ledger(region, page_slots)
                if ledger is not None:
                    rows = ledger.before(slots)
                    self._workspace.queue.put(QueuedEvent(partial(_remember, ledger), [rows], frees=False))

    def expect(self, arrival: Arrival) -> None:
        """Announces the bytes of ``arrival``. From now on the slots hold the arrival's tokens, so forwards reading them
        are checked and the sequence goes on from there; the bytes are judged after the arrival. The transfer must begin
        after this call. `arrive` must follow with the same object, or `give_up`."""
        if not self._switch.enabled or not self._fits("expect", arrival):
            return
        region, state = arrival.region, self._slots.workspace.states[arrival.region]
        with self._switch.guard("ledger.expect"):
            self._workspace.join()
            ledger = self._ledger(region, arrival.page_slots)
            if ledger is not None:
                ledger.remember(ledger.before(arrival.blocks.inside(arrival.slots)))
                ledger.expect(arrival)
        self._slots.expect(region, arrival.slots)
        with self._switch.guard("ledger.expect"):
            rows = self._rows(arrival)
            self._expected[arrival] = rows
            apply = partial(arrivals.expect, state, arrival.slots, rows, arrival.writer)
            self._workspace.queue.put_arrival(apply, arrival.slots, rows)

    def arrive(self, arrival: Arrival, ready: Sequence[torch.cuda.Event] = ()) -> None:
        """The bytes of ``arrival`` are there, for work on the current stream, which must be the forwards', or after the
        events ``ready``. They are fingerprinted, so that the scrub watches them from now on, and complete blocks are
        compared, except blocks written by a forward since `expect`. Without `expect`, no forward may have been issued
        since the transfer began, except one already checked and not yet recorded.

        Takes effect at once, or where events wait for the next forward, after those; `SlotEvents.settle` ends the wait.
        Until then nothing else may write to the slots.
        """
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

    def awaits(self, arrival: Arrival) -> bool:
        """Whether the verdict on ``arrival``, whose bytes are there, is still on its way to the host; never once Canary
        is off. Before, `SlotEvents.settle` must have ended the wait of `arrive`, and `send` begun the way."""
        ledger = self._regions.get(arrival.region)
        return self._switch.enabled and ledger is not None and arrival in ledger.due

    def give_up(self, arrival: Arrival) -> None:
        """The bytes of an expected ``arrival`` will not come, or are unknown: the slots are not judged until
        rewritten."""
        if self._expected.pop(arrival, None) is not None:
            ledger = self._regions.get(arrival.region)
            if ledger is not None:
                ledger.give_up(arrival)
            self._slots.forget(arrival.region, arrival.slots)

    def emptied(self) -> bool:
        """Nothing kept so far can come back: the engine has emptied its prefix cache and all places outside of the pool
        that KV goes to, and no request has KV from before. So entries and doubt go, and prefixes are judged again whose
        entries were evicted or never known. To be called right after the last place was emptied, before any KV is
        computed. Waits for the device.

        Returns False, and changes nothing, while an expected arrival is due: its bytes are from before."""
        if not self._switch.enabled or self._expected:
            return False
        with self._switch.guard("ledger.emptied"):
            # What came before is judged by what is doubtful now.
            self.read(wait=True)
            for ledger in self._regions.values():
                ledger.emptied()
            self._told_blind.clear()
            self._told_doubt = 0.0
        return True

    def export(self, region: str, page_slots: int, hashes: Iterable[int] | None = None) -> bytes:
        """The entries of ``hashes`` (None: all), for the ledger of an engine that gets the bytes; prefixes in doubt are
        marked. Includes everything kept before: waits for the device. Empty where nothing is kept."""
        ledger = self._ledger(region, page_slots) if self._switch.enabled else None
        if ledger is None:
            return b""
        self.read(wait=True)
        return ledger.export(hashes, self._config.rank)

    def import_entries(self, region: str, page_slots: int, data: bytes | bytearray | memoryview) -> int:
        """Enters the export of a peer's ledger: an engine whose bytes come here, with the same model, sources, block
        size and rank. Call before the bytes arrive. Returns the number of entries. Those of other keys
        (``CANARY_KEY_FILE``) are not entered, and their prefixes are in doubt. Raises `AttachError` where the formats
        don't fit."""
        ledger = self._ledger(region, page_slots) if self._switch.enabled else None
        if ledger is None or not len(data):
            return 0
        entered = ledger.import_entries(data, self._config.rank)
        if ledger.counts["other_keys"] and not self._told_keys:
            self._told_keys = True
            self._switch.tell(other_keys("entries of a ledger", ledger.counts["other_keys"]))
        return entered

    def send(self) -> None:
        """Starts the copy of gathered rows, on the current stream, which must be the forwards' or come after it. Never
        waits, never captured."""
        for ledger in self._regions.values():
            ledger.send()

    def read(self, wait: bool = False) -> None:
        """Enters and judges rows arrived on the host, and reports findings. ``wait``: for all rows of calls so far, and
        so for the device."""
        if wait:
            self._workspace.join()
            self._workspace.queue.settle()
            self.send()
        for name, ledger in self._regions.items():
            found, shared = ledger.read(self._facade.forwards, wait)
            for origin in shared:
                reason = (
                    f"{origin.name} brought a prefix that this engine never kept, so others store there too, or it "
                    "stored something that canary.ledger.keep was not told; a difference proves nothing any more and "
                    "counts as ledger_unknown"
                )
                self.shared.append(origin.name)
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
        """Counts over all regions: ``ledger_entries``, their ``ledger_bytes`` of host memory, and ``evicted`` ones; of
        the blocks that left, those ``kept`` or ``imported``, and partly unknown ones (``unclear``); of the blocks that
        came back, those ``compared`` with an entry, ``matched``, ``differing``, ``nothing_came``, ``left_out``,
        ``another_sequence``, ``another_identity``, ``lossy``, ``unknown`` (nothing to compare with, or more may have
        been stored), ``rewritten`` (a forward wrote there before the read) and ``unjudged`` (unknown prefix); and
        ``partial`` ones; entries with ``other_keys``; and how often all places were ``emptied``. All names begin with
        ``ledger_``. Zeros are left out. ``ledger_doubt_ratio`` is `doubt_ratio`."""
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
        """Reports each of `DOUBT_TOLD` once, when such a share can't be judged any more."""
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
        """The region's ledger; None where nothing is kept: the ledger is off, or ``region`` is not among its
        regions."""
        if region not in self._kept:
            return None
        ledger = self._regions.get(region)
        if ledger is None:
            state = self._workspace.states[region]
            writers = self._facade.writers
            ledger = RegionLedger(state, self._workspace.backend, writers, page_slots, self._size_bytes)
            if self._config.on_violation != "report":
                # What is not told is acted on all the same.
                ledger.most_findings = sys.maxsize
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
        """The records for the arrival's slots, on the device. Never waits for the device."""
        blocks = arrival.blocks
        layout = PayloadLayout.of(self._workspace.states[arrival.region])
        rows = arrivals.sequence_rows(layout, blocks.tokens, blocks.first, blocks.hashes)
        return upload(rows, self._workspace.device)

    def _fits(self, event: str, arrival: Arrival) -> bool:
        return self._told(event, arrival.region, arrival.slots, arrival.page_slots)

    def _told(self, event: str, region: str, slots: Tensor, page_slots: int) -> bool:
        """Whether the arguments are possible. Reports misuse."""
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


def _remember(ledger: RegionLedger, tensors: list[Tensor]) -> None:
    ledger.remember(tensors[0])


def _gather(ledger: RegionLedger, paged: bool, tensors: list[Tensor]) -> None:
    ledger.gather(tensors[0] if len(tensors) == 1 else torch.cat(tensors), paged)
