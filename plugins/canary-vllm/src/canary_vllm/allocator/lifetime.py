"""`Lifetime`: tells Canary, in a worker, what the scheduler did with blocks."""

from collections.abc import Callable, Sequence

from canary_adapters import BlockEvent, BlockEvents, report_breaches
from canary_core import Canary, Event
from canary_vllm.allocator.messages import Message
from canary_vllm.batches.requests import Requests
from canary_vllm.pools.pool import Group
from canary_vllm.prefix_cache.structure import Swept

LOST, NEVER = 3, 64
"""So many outputs in a row without a message show that the scheduler is not followed any more, or never was: outputs of
vLLM's warm-up have none."""


class Lifetime:
    """Replays messages of the scheduler before the forward with whose batch they came.

    All groups take their blocks from one pool, and a block belongs to one group at a time.
    ``blocks``: what it tells of them. ``judged``: whether misuse of blocks is a finding.
    """

    def __init__(self, canary: Canary, groups: Sequence[Group], requests: Requests, judged: bool) -> None:
        self._canary = canary
        self._groups = groups
        self.blocks = BlockEvents(canary, groups, requests.writers.id, judged)
        self._next: int | None = None
        self._over = False
        self._missing = 0

    def replay(self, message: Message | None, given: Callable[[], Sequence[Sequence[Sequence[int]]]]) -> None:
        """``message``: None where the scheduler is not followed. ``given``: see `messages.given`. A prefix
        hit may be of a block that this very step writes; where nobody tells which, none is judged."""
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
            # What vLLM wrote before the scheduler gave any block away, to warm up, is nobody's.
            for group in self._groups:
                self._canary.slots.clear(group.region, None)
        self._next, self._missing = message.number + 1, 0
        self.blocks.tell(message.events)
        if message.swept is not None:
            self._swept(message.swept)

    def _swept(self, swept: Swept) -> None:
        """Tells what a sweep found, in the first region: all of them have the pool's blocks."""
        new = report_breaches(self._canary, self._groups[0], swept.breaches)
        fields: dict[str, object] = {"nodes": swept.cached, "findings": new}
        self._canary.tell(Event("sweep", "warning" if new else "info", fields))
        self._canary.count("sweeps")

    def _end(self, reason: str) -> None:
        self._over = True
        regions = [group.region for group in self._groups]
        for region in regions:
            self._canary.slots.end_lifetime(region)
        self._canary.tell(Event("lifetime_off", "error", {"reason": reason, "regions": regions}))
