"""`RegionLedger`: entries of stored KV in one region, and the verdict on returning blocks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

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
    BLOCK_WHO,
    Block,
    Happened,
    Kind,
    Phase,
)
from canary_core.runtime.writers import Writers
from canary_core.violation import Violation
from canary_core.watchers.ledger.arrival import Arrival, Origin
from canary_core.watchers.ledger.doubt import Doubt
from canary_core.watchers.ledger.exchange import COMPLETE, HASH, SUM, VALUES, Format
from canary_core.watchers.ledger.outbox import Outbox
from canary_core.watchers.ledger.proofs import Came, Disproof, Proofs
from canary_core.watchers.ledger.table import Match, Table
from canary_core.watchers.ledger.wording import fold, positions

MOST_FINDINGS = 64
"""Most findings reported by one read, where nobody acts on findings; `differing` in the counts has the full number."""

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


BEFORE: Literal["before"] = "before"
"""About rows gathered before a load."""

_JUDGED = Block.TOKENS | Block.BYTES | Block.OUTSIDE | Block.REWRITTEN


class RegionLedger:
    """The ledger of the region ``state``, for blocks of ``page_slots`` slots, in about ``size_bytes`` of host memory.

    `gather` and `land` run on the stream of the forwards, in the order of events; `send` and `read` on the host. Rows
    are read in the order gathered, so that everything kept before an arrival is known at the verdict.

    counts: number of blocks by fate.
    """

    def __init__(
        self, state: RegionState, backend: Backend, writers: Writers, page_slots: int, size_bytes: int
    ) -> None:
        self.state = state
        self.page_slots = page_slots
        self._backend = backend
        self._writers = writers
        self._size_bytes = size_bytes
        self._begin()
        self._outbox: Outbox[Landed | Literal["before"] | None] = Outbox(
            BLOCK_VALUES + state.sources.columns, state.records.device
        )
        self._awaited: Counter[int] = Counter()
        self._shared: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.most_findings = MOST_FINDINGS
        self.due: set[Arrival] = set()
        """Arrivals whose bytes are there, and whose verdict is not yet on the host."""

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

    def before(self, slots: Tensor) -> Tensor:
        """The known facts about ``slots``, integer ``[blocks * page_slots]``, to which bytes will come; reads no
        bytes. On any stream."""
        return arrivals.content_before(self._backend, self.state, slots, self.page_slots)

    def remember(self, rows: Tensor) -> None:
        """Sends the result of `before` on its way to the verdict."""

        def copy(to: Tensor, first: int, begin: int, end: int) -> None:
            to[first : first + end - begin] = rows[begin:end]

        self._outbox.write(len(rows), copy, lambda _: BEFORE)

    def land(self, landed: Landed, rows: Tensor) -> None:
        """The bytes of an arrival are there: they are fingerprinted, and the results sent on their way to the verdict.
        ``rows``: `arrivals.sequence_rows` on the device."""
        arrival = landed.arrival
        state, slots, blocks = self.state, arrival.slots, arrival.blocks
        if not landed.expected:
            self.remember(self.before(blocks.inside(slots)))
            arrivals.expect(state, slots, rows, arrival.writer)
        self._backend.note(state, slots, Happened.ARRIVE, arrival.writer)
        mine = arrivals.still_expected(state, slots, rows)
        self._backend.adopt(state, torch.where(mine, slots, -1))
        if blocks.count:
            self.due.add(arrival)
            rewritten = ~blocks.inside(mine).view(blocks.count, self.page_slots).all(1)
            self._gather(blocks.inside(slots), BlockShape(self.page_slots), landed, rewritten)
        self.counts["partial"] += blocks.partial

    def send(self) -> None:
        """Starts the copy of gathered rows, on the current stream. Never waits."""
        self._outbox.send()

    def read(self, forwards: int, wait: bool = False) -> tuple[list[Violation], list[Origin]]:
        """Takes rows arrived on the host: enters kept blocks, judges returned ones. ``forwards``: how many have begun.
        Returns findings, and origins that turned out to be shared."""
        self.table.forwards = forwards
        found: list[Violation] = []
        shared: list[Origin] = []
        for rows, landed in self._outbox.arrived(wait):
            if landed is None:
                self._enter(rows)
            elif landed == BEFORE:
                self._proofs.remember(rows)
            else:
                found += self._judge(rows, landed, shared, self.most_findings - len(found))
        return found, shared

    def emptied(self) -> None:
        """See `Ledger.emptied`."""
        evicted = self.table.evicted
        self._begin()
        self.table.evicted = evicted
        self.counts["emptied"] += 1

    def _begin(self) -> None:
        """Nothing is kept, and nothing in doubt."""
        sums_bytes = self._size_bytes // SUMS_SHARE
        self.table = Table(self.state.sources.columns, self._size_bytes - sums_bytes)
        self._proofs = Proofs(self.state, self.table, self.page_slots, self._writers)
        self._sums = Doubt(sums_bytes)
        self._looked_up = self._in_doubt = 0

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
        entries, same = self._format(rank).unpack(data)
        if not same:
            # Nobody can say what these blocks have to be: own ones of the prefix may be of other numerics.
            self.table.doubt.add(entries[:, HASH].tolist())
            self.counts["other_keys"] += len(entries)
            return 0
        self.table.doubt.add(entries[entries[:, COMPLETE] == 0, HASH].tolist())
        self.table.add(entries[:, HASH], entries[:, SUM], entries[:, VALUES:])
        self.counts["imported"] += len(entries)
        return len(entries)

    def _format(self, rank: int) -> Format:
        layout = PayloadLayout.of(self.state)
        return Format(replace(layout, keys=0).digest, self.page_slots, rank, self.state.sources.columns, layout.keys)

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
        self.table.add(kept[:, BLOCK_HASH], kept[:, BLOCK_SUM], kept[:, BLOCK_VALUES:], who=kept[:, BLOCK_WHO])
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
        if landed.begin + len(rows) == arrival.blocks.count:
            self.due.discard(arrival)
            if landed.expected:
                self.give_up(arrival)
        part = slice(landed.begin, landed.begin + len(rows))
        flags = rows[:, BLOCK_FLAGS]
        rewritten = flags & Block.REWRITTEN != 0
        counts["rewritten"] += int(rewritten.sum())
        index = (flags & _JUDGED == Block.TOKENS | Block.BYTES).nonzero()[:, 0]
        # Without an anchor the slots' prefix is not known, so none of its blocks is.
        prefixed = flags[index] & Block.PREFIX != 0
        hashes, sums, values = arrival.blocks.ends[part][index], arrival.blocks.sums[part][index], rows[index]
        values = values[:, BLOCK_VALUES:]
        doubts: list[bool] = self._doubted(hashes, sums).tolist()
        matches = [
            m if p else Match(0)
            for m, p in zip(self.table.match(hashes.tolist(), values), prefixed.tolist(), strict=True)
        ]
        verdicts = [
            self._verdict(match, arrival.origin, doubt) if told else "unjudged"
            for match, doubt, told in zip(matches, doubts, prefixed.tolist(), strict=True)
        ]
        private = not arrival.origin.shared and arrival.origin.name not in self._shared
        own = [private and verdict in ("stranger", "differing") for verdict in verdicts]
        blocks = (index + landed.begin).tolist()
        came = Came(arrival, blocks, rows[index], hashes.tolist(), sums.tolist(), own)
        proofs = self._proofs.of(came, [i for i, verdict in enumerate(verdicts) if verdict != "matched"])
        counts["unjudged"] += len(rows) - len(index) - int(rewritten.sum())
        findings: list[Violation] = []
        bad = torch.zeros(len(index), dtype=torch.bool, device="cpu")
        for i, (match, verdict) in enumerate(zip(matches, verdicts, strict=True)):
            proof = proofs.get(i)
            self._in_doubt += verdict == "unknown" and doubts[i] and proof is None
            counts["compared"] += match.entries > 0
            counts[verdict if proof is None else proof.rule] += 1
            if proof is None and verdict == "stranger":
                counts["unknown"] += 1
                if arrival.origin.name not in self._shared and not arrival.origin.shared:
                    self._shared.add(arrival.origin.name)
                    shared.append(arrival.origin)
            if proof is not None or verdict == "differing":
                bad[i] = True
                if len(findings) < most:
                    findings.append(
                        self._finding(landed, came.rows[i], blocks[i], proof or self._difference(came, i, match))
                    )
        self._looked_up += int(prefixed.sum())
        if self._looked_up > 2 * RECENT:
            self._looked_up, self._in_doubt = self._looked_up // 2, self._in_doubt // 2
        # What came may leave again, and then this is what is stored. What was found to be wrong is remembered as such.
        for which, condemned in ((~bad & prefixed, False), (bad & prefixed, True)):
            self.table.add(hashes[which], sums[which], values[which], condemned)
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

    def _difference(self, came: Came, i: int, match: Match) -> Disproof:
        """The bytes are unlike all entries of the prefix."""
        nearest = self.table.values(match.nearest)
        values = came.rows[i, BLOCK_VALUES:]
        columns = self.state.sources.changed(nearest, values)
        stored = int(nearest[self.state.sources.column_of(columns[0])])
        where = positions(came.arrival.blocks.position(came.blocks[i]), self.page_slots)
        return Disproof(
            "differing", columns, f"{where}; {fold(list(self.state.sources), columns)}", stored_value=stored
        )

    def _finding(self, landed: Landed, row: Tensor, block: int, proof: Disproof) -> Violation:
        arrival, sources, columns = landed.arrival, self.state.sources, proof.columns
        only = sources[columns[0]] if len(columns) == 1 else None
        slot = int(row[BLOCK_SLOT])
        own, other = proof.identities or (None, None)
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
            position=arrival.blocks.position(block),
            stored_value=proof.stored_value,
            found_value=int(row[BLOCK_VALUES + sources.column_of(columns[0])]),
            request=landed.request,
            stored_request=proof.stored_request,
            stored_position=proof.stored_position,
            rule=None if proof.rule == "differing" else proof.rule,
            origin=arrival.origin.name,
            sources=tuple(sources[column].name for column in columns),
            identity=own,
            stored_identity=other,
            detail=proof.detail,
        )
