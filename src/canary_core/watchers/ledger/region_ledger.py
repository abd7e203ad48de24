"""`RegionLedger`: entries of stored KV in one region, and the verdict on returning blocks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from canary_core.ops import arrivals
from canary_core.ops.backends import Backend
from canary_core.ops.blocks import BlockShape
from canary_core.ops.payload import PayloadLayout
from canary_core.ops.state import RegionState
from canary_core.records import (
    BLOCK_FLAGS,
    BLOCK_HASH,
    BLOCK_SLOT,
    BLOCK_SUM,
    BLOCK_VALUES,
    Block,
    Happened,
    Kind,
    Phase,
)
from canary_core.violation import Violation
from canary_core.watchers.ledger.arrival import Arrival, Origin
from canary_core.watchers.ledger.doubt import Doubt
from canary_core.watchers.ledger.exchange import COMPLETE, HASH, SUM, VALUES, Format
from canary_core.watchers.ledger.outbox import Outbox
from canary_core.watchers.ledger.table import Match, Table
from canary_core.watchers.ledger.wording import fold

MOST_FINDINGS = 64
"""Most findings reported by one read; `differing` in the counts has the full number."""

SUMS_SHARE = 64
"""The `Doubt` of sums takes one part in so many of the ledger's memory, once there is any. Evicted entries are not in
it, so that looking up both errs hardly more often than looking up one."""

RECENT = 4096
"""Returned blocks behind `RegionLedger.doubt_ratio`: at most twice as many, halved after that."""

FEW = 64
"""Fewest returned blocks for a meaningful share."""


@dataclass(frozen=True, slots=True, eq=False)
class Landed:
    """Facts about the rows of an arrival, from its block number ``begin`` on. ``expected``: whether `expect` came
    before; ``forward``: number of the last forward before; ``request``: the writer's name."""

    arrival: Arrival
    expected: bool
    forward: int
    request: str | None = None
    begin: int = 0


class RegionLedger:
    """The ledger of the region ``state``, for blocks of ``page_slots`` slots, in about ``size_bytes`` of host memory.

    `gather` and `land` run on the stream of the forwards, in the order of events; `send` and `read` on the host. Rows
    are read in the order gathered, so that everything kept before an arrival is known at the verdict.

    counts: number of blocks by fate.
    """

    def __init__(self, state: RegionState, backend: Backend, page_slots: int, size_bytes: int) -> None:
        self.state = state
        self.page_slots = page_slots
        self._backend = backend
        sums_bytes = size_bytes // SUMS_SHARE
        self.table = Table(len(state.sources), size_bytes - sums_bytes)
        self._sums = Doubt(sums_bytes)
        self._looked_up = self._in_doubt = 0
        self._outbox: Outbox[Landed | None] = Outbox(BLOCK_VALUES + len(state.sources), state.records.device)
        self._awaited: Counter[int] = Counter()
        self._shared: set[str] = set()
        self.counts: Counter[str] = Counter()

    def expect(self, arrival: Arrival) -> None:
        """Until the verdict on ``arrival``, or `give_up`: blocks of its prefixes with unknown bytes are no loss, since
        they will be entered on arrival."""
        self._awaited.update(arrival.blocks.ends.tolist())

    def give_up(self, arrival: Arrival) -> None:
        """The arrival will not come, or is judged now."""
        self._awaited.subtract(arrival.blocks.ends.tolist())
        self._awaited = +self._awaited

    def gather(self, slots: Tensor, paged: bool) -> None:
        """Sends the known facts about ``slots`` on their way to the table: integer ``[blocks * page_slots]``, or
        ``[blocks]`` numbers of pages."""
        self._gather(slots, BlockShape(self.page_slots, paged))

    def land(self, landed: Landed, rows: Tensor) -> None:
        """The bytes of an arrival are there: they are fingerprinted, and the results sent on their way to the verdict.
        ``rows``: `arrivals.sequence_rows` on the device."""
        arrival = landed.arrival
        state, slots, blocks = self.state, arrival.slots, arrival.blocks
        if not landed.expected:
            arrivals.expect(state, slots, rows, arrival.writer)
        self._backend.note(state, slots, Happened.ARRIVE, arrival.writer)
        mine = arrivals.still_expected(state, slots, rows)
        self._backend.adopt(state, torch.where(mine, slots, -1))
        if blocks.count:
            inside = slice(blocks.skipped, blocks.skipped + blocks.count * self.page_slots)
            rewritten = ~mine[inside].view(blocks.count, self.page_slots).all(1)
            self._gather(slots[inside], BlockShape(self.page_slots), landed, rewritten)
        self.counts["partial"] += blocks.partial

    def send(self) -> None:
        """Starts the copy of gathered rows, on the current stream. Never waits."""
        self._outbox.send()

    def read(self, wait: bool = False) -> tuple[list[Violation], list[Origin]]:
        """Takes rows arrived on the host: enters kept blocks, judges returned ones. Returns findings, and origins that
        turned out to be shared."""
        found: list[Violation] = []
        shared: list[Origin] = []
        for rows, landed in self._outbox.arrived(wait):
            if landed is None:
                self._enter(rows)
            else:
                found += self._judge(rows, landed, shared, MOST_FINDINGS - len(found))
        return found, shared

    @property
    def doubt_ratio(self) -> float:
        """The share of comparisons left open by doubt: of prefixes without any loss, or of the blocks returned last,
        whichever is more."""
        returned = self._in_doubt / self._looked_up if self._looked_up >= FEW else 0.0
        prefix, sum_ = self.table.doubt.ratio(), self._sums.ratio()
        return max(1 - (1 - prefix) * (1 - sum_), returned)

    def export(self, hashes: Iterable[int] | None, rank: int) -> bytes:
        """See `Ledger.export`."""
        keys, sums, values = self.table.rows(hashes)
        complete = (~self._doubted(keys, sums)).long()
        return self._format(rank).pack(torch.cat((keys[:, None], sums[:, None], complete[:, None], values), dim=1))

    def import_entries(self, data: bytes | bytearray | memoryview, rank: int) -> int:
        """See `Ledger.import_entries`."""
        entries = self._format(rank).unpack(data)
        self.table.doubt.add(entries[entries[:, COMPLETE] == 0, HASH].tolist())
        self.table.add(entries[:, HASH], entries[:, SUM], entries[:, VALUES:])
        self.counts["imported"] += len(entries)
        return len(entries)

    def _format(self, rank: int) -> Format:
        return Format(PayloadLayout.of(self.state).digest, self.page_slots, rank, len(self.state.sources))

    def _gather(
        self, slots: Tensor, block: BlockShape, landed: Landed | None = None, rewritten: Tensor | None = None
    ) -> None:
        def gather(rows: Tensor, first: int, begin: int, end: int) -> None:
            part = slots[block.numbers(begin) : block.numbers(end)]
            self._backend.gather_blocks(self.state, part, block, rows, first)
            if rewritten is not None:
                rows[first : first + end - begin, BLOCK_FLAGS] += rewritten[begin:end] * int(Block.REWRITTEN)

        def about(begin: int) -> Landed | None:
            return landed and replace(landed, begin=begin)

        self._outbox.write(block.blocks(len(slots)), gather, about)

    def _enter(self, rows: Tensor) -> None:
        """Enters kept blocks. Partly unknown ones leave their prefix in doubt: somebody may have stored them and bring
        them back."""
        flags = rows[:, BLOCK_FLAGS]
        whole = flags == Block.whole()
        kept = rows[whole]
        self.table.add(kept[:, BLOCK_HASH], kept[:, BLOCK_SUM], kept[:, BLOCK_VALUES:])
        self.counts["kept"] += len(kept)
        doubted: list[int] = []
        grown: list[int] = []
        for hash, sum, flag in rows[~whole, : BLOCK_FLAGS + 1].tolist():
            if flag & Block.OUTSIDE:
                # Evicted from a window, or padding: no bytes that anybody could have stored.
                self.counts["partial"] += 1
            elif flag & Block.PREFIX and hash in self._awaited:
                # Its bytes are entered when they have come.
                continue
            else:
                self.counts["unclear"] += 1
                if flag & Block.PREFIX:
                    doubted.append(hash)
                elif flag & Block.TOKENS:
                    grown.append(sum)
                else:
                    self.table.doubt.everything = True
        self.table.doubt.add(doubted)
        self._sums.add(grown)

    def _doubted(self, hashes: Tensor, sums: Tensor) -> Tensor:
        """Whether something missing in the table may have been stored under each of ``hashes``: bool ``[n]``."""
        return self.table.doubt.has(hashes) | self._sums.has(sums)

    def _judge(self, rows: Tensor, landed: Landed, shared: list[Origin], most: int) -> list[Violation]:
        arrival, counts = landed.arrival, self.counts
        if landed.expected and landed.begin + len(rows) == arrival.blocks.count:
            self.give_up(arrival)
        part = slice(landed.begin, landed.begin + len(rows))
        hashes, sums = arrival.blocks.ends[part], arrival.blocks.sums[part]
        known = rows[:, BLOCK_FLAGS] == Block.whole()
        counts["rewritten"] += int((rows[:, BLOCK_FLAGS] & Block.REWRITTEN != 0).sum())
        counts["unjudged"] += int((~known & (rows[:, BLOCK_FLAGS] & Block.REWRITTEN == 0)).sum())
        # Without an anchor the slots' prefix is not known, so none of its blocks is.
        index = known.nonzero()[:, 0]
        values = rows[index, BLOCK_VALUES:]
        listed = hashes[index].tolist()
        wrong: list[int] = []
        findings: list[Violation] = []
        doubts: list[bool] = self._doubted(hashes[index], sums[index]).tolist()
        for i, match in enumerate(self.table.match(listed, values)):
            verdict = self._verdict(match, arrival.origin, doubts[i])
            self._in_doubt += verdict == "unknown" and doubts[i]
            counts["compared"] += match.entries > 0
            counts[verdict] += 1
            if verdict == "stranger":
                counts["unknown"] += 1
                if arrival.origin.name not in self._shared and not arrival.origin.shared:
                    self._shared.add(arrival.origin.name)
                    shared.append(arrival.origin)
            if verdict == "differing":
                wrong.append(i)
                if len(findings) < most:
                    block = int(index[i])
                    findings.append(self._finding(landed, rows[block], landed.begin + block, match))
        self._looked_up += len(index)
        if self._looked_up > 2 * RECENT:
            self._looked_up, self._in_doubt = self._looked_up // 2, self._in_doubt // 2
        bad = torch.zeros(len(index), dtype=torch.bool, device="cpu")
        bad[wrong] = True
        # What came may leave again, and then this is what is stored. What was found to be wrong is remembered as such.
        for which, condemned in ((~bad, False), (bad, True)):
            self.table.add(hashes[index][which], sums[index][which], values[which], condemned)
        return findings

    def _verdict(self, match: Match, origin: Origin, doubted: bool) -> str:
        """The name of the count for a returned block."""
        if match.equal and not match.condemned:
            return "matched"
        if origin.lossy:
            return "lossy"
        if not match.entries:
            return "unknown" if doubted or match.condemned else "stranger"
        if doubted or origin.shared or origin.name in self._shared:
            return "unknown"
        return "differing"

    def _finding(self, landed: Landed, row: Tensor, block: int, match: Match) -> Violation:
        arrival, sources = landed.arrival, self.state.sources
        stored = self.table.values(match.nearest)
        found = row[BLOCK_VALUES:]
        columns = (stored != found).nonzero()[:, 0].tolist()
        only = sources[columns[0]] if len(columns) == 1 else None
        slot = int(row[BLOCK_SLOT])
        position = arrival.blocks.position(block)
        return Violation(
            kind=Kind.ARRIVAL,
            region=self.state.region.name,
            phase=Phase.EVENT,
            step=landed.forward,
            slot=slot,
            page=slot // self.state.region.sources[0].page_size,
            source=only.name if only else None,
            layer=only.layer if only else None,
            half=only.half if only else None,
            position=position,
            stored_value=int(stored[columns[0]]),
            found_value=int(found[columns[0]]),
            request=landed.request,
            origin=arrival.origin.name,
            sources=tuple(sources[column].name for column in columns),
            detail=f"{_positions(position, self.page_slots)}; {fold(list(sources), columns)}",
        )


def _positions(first: int, count: int) -> str:
    return f"position {first}" if count == 1 else f"positions {first} to {first + count - 1}"
