"""`Lifetime`: tells Canary, in a worker, what the scheduler did with blocks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from canary_adapters import upload
from canary_core import Canary, Event, Kind, Phase, Violation
from canary_vllm.allocator.messages import BlockEvent, Message
from canary_vllm.batches.requests import Requests
from canary_vllm.pools.pool import Group
from canary_vllm.prefix_cache.structure import Swept


class Lifetime:
    """Replays messages of the scheduler before the forward with whose batch they came.

    All groups take their blocks from one pool, and a block belongs to one group at a time, so each event is told of all
    regions: where a block is not used it is handed out and never written.
    ``judged``: whether misuse of blocks is a finding; else only their content is followed.
    """

    def __init__(self, canary: Canary, groups: Sequence[Group], requests: Requests, judged: bool) -> None:
        self._canary = canary
        self._groups = groups
        self._requests = requests
        self._judged = judged
        self._next: int | None = None
        self._over = False

    def replay(self, message: Message | None) -> None:
        """``message``: None where the scheduler is not followed."""
        if message is None or self._over:
            return
        if message.broken is not None:
            self._end(message.broken)
            return
        if self._next is not None and message.number != self._next:
            self._end(f"message {message.number} of the scheduler came where {self._next} was due")
            return
        if self._next is None and message.number == 0:
            # What vLLM wrote before the scheduler gave any block away, to warm up, is nobody's.
            for group in self._groups:
                self._canary.slots.clear(group.region, None)
        self._next = message.number + 1
        runs = runs_of(message.events)
        if runs:
            counts = [sum(len(event.blocks) for event in run) for run in runs]
            blocks = upload([b for run in runs for event in run for b in event.blocks], self._canary.device)
            for run, numbers in zip(runs, blocks.split(counts), strict=True):
                self._tell(run, numbers)
        if message.swept is not None:
            self._swept(message.swept)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks are copied, (from, to), before the next forward: the records go with the bytes."""
        blocks = upload([block for pair in pairs for block in pair], self._canary.device).view(-1, 2)
        for group in self._groups:
            source, destination = (self._slots(group, blocks[:, side]) for side in (0, 1))
            self._canary.slots.copy(group.region, source, destination)

    def _tell(self, events: Sequence[BlockEvent], numbers: Tensor) -> None:
        sort, chosen = events[0].sort, events[0].group
        slots = self._canary.slots
        writer = self._writers(events) if self._judged else None
        for group in self._groups:
            if chosen is not None and chosen != group.number:
                continue
            if sort in ("same_step", "arrive"):
                slots.forget(group.region, self._slots(group, numbers))
            elif writer is not None:
                getattr(slots, sort)(group.region, numbers, writer, page_slots=group.block)
            elif sort == "alloc":
                slots.clear(group.region, self._slots(group, numbers))

    def _writers(self, events: Sequence[BlockEvent]) -> int | Callable[[], Tensor]:
        ids = [-1 if event.request is None else self._requests.writers.id(event.request) for event in events]
        if len(set(ids)) == 1:
            return ids[0]
        every = [i for i, event in zip(ids, events, strict=True) for _ in event.blocks]
        each = upload(every, self._canary.device, torch.int32)
        return lambda: each

    def _slots(self, group: Group, blocks: Tensor) -> Tensor:
        inside = torch.arange(group.block, device=blocks.device)
        return (blocks[:, None] * group.block + inside).flatten()

    def _swept(self, swept: Swept) -> None:
        """Tells what a sweep found, in the first region: all of them have the pool's blocks."""
        group, canary = self._groups[0], self._canary
        found = [
            Violation(
                kind=Kind.CACHE_STRUCTURE,
                region=group.region,
                phase=Phase.SWEEP,
                step=canary.forwards,
                slot=breach.block * group.block,
                node=breach.block,
                rule=breach.rule,
                detail=breach.detail,
            )
            for breach in swept.breaches
        ]
        new = canary.report(found)
        fields: dict[str, object] = {"nodes": swept.cached, "findings": new}
        canary.tell(Event("sweep", "warning" if new else "info", fields))
        canary.count("sweeps")

    def _end(self, reason: str) -> None:
        self._over = True
        regions = [group.region for group in self._groups]
        for region in regions:
            self._canary.slots.end_lifetime(region)
        self._canary.tell(Event("lifetime_off", "error", {"reason": reason, "regions": regions}))


def runs_of(events: Sequence[BlockEvent]) -> list[list[BlockEvent]]:
    """``events`` in runs of one sort, each of which is told as one event: when a batch begins, each of its requests
    shares some blocks and is given others. An event joins an earlier run of its sort, unless it or a run after that is
    about one of its blocks."""
    runs: list[tuple[list[BlockEvent], set[int]]] = []
    for event in events:
        blocks, like = set(event.blocks), (event.sort, event.group)
        # The last run that this must not come before, or may join.
        for run, touched in reversed(runs):
            if touched & blocks or (run[0].sort, run[0].group) == like:
                break
        else:
            run, touched = [], blocks
        if not run or touched & blocks:
            runs.append(([event], blocks))
        else:
            run.append(event)
            touched |= blocks
    return [run for run, _ in runs]
