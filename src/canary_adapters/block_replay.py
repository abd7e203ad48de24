"""Blocks of a scheduler in another process than its workers: messages sent along with its batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from canary_adapters.block_breaches import BlockSweep
from canary_adapters.block_events import BlockEvent, BlockEvents, BlockGroup
from canary_adapters.prefix_hits import hits_unchecked
from canary_core import Arrival, Canary, Event, Origin, Writers
from canary_core.ops.upload import upload


@dataclass(slots=True)
class BlockLoad:
    """KV of ``request`` comes from elsewhere, from position ``first`` on. ``tokens``: all of its tokens up to the last
    one brought. ``blocks``: of each group, the blocks from the one of position ``first`` on, 0 for none. ``known``:
    whether the tokens say what is computed. ``lora``, ``cache_salt``: see `Writers.identify`; a request that waits for
    its KV has not been scheduled yet."""

    request: str
    tokens: list[int]
    first: int
    blocks: list[list[int]]
    known: bool = True
    lora: str | None = None
    cache_salt: str | None = None

    def slots(
        self, group: BlockGroup, device: torch.device, computed: int | None = None
    ) -> tuple[Tensor, frozenset[int]]:
        """The slots of ``group`` for the tokens brought, of the first ``computed`` ones (-1: none); and the numbers of
        their blocks."""
        position = torch.arange(self.first, len(self.tokens[:computed]), device="cpu")
        if not len(position) or group.number >= len(self.blocks):
            return torch.empty(0, dtype=torch.int64, device=device), frozenset()
        size = group.block
        block = upload(self.blocks[group.number], position.device)[position // size - self.first // size]
        slots = upload(torch.where(block > 0, block * size + position % size, -1).tolist(), device)
        return slots, frozenset(block.tolist())

    def arrival(
        self, group: BlockGroup, computed: int, origin: Origin, known: Writers, device: torch.device
    ) -> tuple[Arrival, frozenset[int]] | None:
        """The arrival for ``group``, with the numbers of its blocks; None for nothing. ``computed``: number of the
        request's tokens that count as computed now; further ones failed, or are computed again."""
        slots, blocks = self.slots(group, device, computed)
        if not blocks or not self.known:
            return None
        anchor, writer = known.anchor(self.request), known.id(self.request)
        return Arrival(group.region, slots, self.tokens[:computed], origin, group.block, anchor, writer), blocks


@dataclass(slots=True)
class BlockMessage:
    """All actions on blocks since the last message. ``number`` counts up by one, so that a worker notices a loss.
    ``broken``: why blocks can't be followed any more, None if they can. ``loads``: KV from elsewhere. ``swept``: result
    of a sweep of the prefix cache, None without one. ``emptied``: no block and nothing outside of the pool holds KV,
    see `Ledger.emptied`. ``salts``, ``traces``: cache salts of new requests, and a ``traceparent``, by name."""

    number: int
    events: list[BlockEvent] = field(default_factory=list)
    broken: str | None = None
    loads: list[BlockLoad] = field(default_factory=list)
    swept: BlockSweep | None = None
    emptied: bool = False
    salts: dict[str, str] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)


LOST, NEVER = 3, 64
"""So many outputs in a row without a message show that the scheduler is not followed any more, or never was: an
engine's warm-up has none."""


class BlockReplay:
    """Replays, in a worker, messages of the scheduler before the forward of their batch.

    All groups take their blocks from one pool, and a block belongs to one group at a time. ``blocks``: receives the
    events. ``writer``, ``judged``: see `BlockEvents`.
    """

    def __init__(
        self, canary: Canary, groups: Sequence[BlockGroup], writer: Callable[[str], int], judged: bool = True
    ) -> None:
        self._canary = canary
        self._groups = groups
        self.blocks = BlockEvents(canary, groups, writer, judged)
        self._next: int | None = None
        self._over = False
        self._missing = 0
        untold = hits_unchecked(canary.config)
        self._hits = canary.config.hit_check and untold is None
        if untold is not None:
            canary.tell(untold)

    def replay(self, message: BlockMessage | None, given: Callable[[], Sequence[Sequence[Sequence[int]]]]) -> None:
        """``message``: None where the scheduler is not followed. ``given``: blocks by group, of each request that got
        any with this batch, handed out or found in the prefix cache. A hit may be of a block written in this very step;
        if nobody knows which, none is judged."""
        if message is not None and not self._over:
            if message.broken is not None:
                self._end(message.broken)
            elif self._next is not None and message.number != self._next:
                self._end(f"message {message.number} of the scheduler came where {self._next} was due")
        if message is None and not self._over:
            self._missing += 1
            if self._missing == (NEVER if self._next is None else LOST):
                self._end(
                    f"{self._missing} outputs of the scheduler came without word of its blocks; see hooks_left_out"
                )
        if message is None or self._over:
            lists = given()
            hits = [(g.number, [b for blocks in lists for b in blocks[g.number] if b]) for g in self._groups]
            self.blocks.tell([BlockEvent("forget", None, blocks, number) for number, blocks in hits if blocks])
            return
        if self._next is None and message.number == 0:
            # What the engine wrote before the scheduler gave any block away, to warm up, is nobody's.
            for group in self._groups:
                self._canary.slots.clear(group.region, None)
        self._next, self._missing = message.number + 1, 0
        if message.emptied:
            self._canary.ledger.emptied()
        told = self.blocks.tell(message.events) if message.events else ()
        if told and self._hits:
            self._check_hits([(run, numbers) for run, numbers in told if run[0].sort == "share"])
        if message.swept is not None:
            # All groups have the pool's blocks.
            message.swept.report(self._canary, self._groups[0])

    def _check_hits(self, shared: Sequence[tuple[Sequence[BlockEvent], Tensor]]) -> None:
        """Compares the bytes of all blocks shared by requests of this batch, before attention reads the blocks. Blocks
        written by the batch itself are left out by their records. ``shared``: runs of sort ``share`` from
        `BlockEvents.tell`."""
        if not shared:
            return
        numbers = shared[0][1]
        if len(shared) > 1 or len(shared[0][0]) > 1:
            # Several requests may share the same ones.
            blocks = sorted({block for run, _ in shared for event in run for block in event.blocks})
            numbers = upload(blocks, self._canary.device)
        self._canary.count("hit_blocks", len(numbers))
        for group in self._groups:
            self._canary.slots.check(group.region, numbers, page_slots=group.block)

    def _unchecked(self, reason: str) -> None:
        self._hits = False
        self._canary.tell(Event("hits_unchecked", "error", {"reason": reason}))

    def _end(self, reason: str) -> None:
        self._over = True
        if self._hits:
            self._unchecked(reason)
        regions = [group.region for group in self._groups]
        for region in regions:
            self._canary.slots.end_lifetime(region)
        self._canary.tell(Event("lifetime_off", "error", {"reason": reason, "regions": regions}))
