"""`Quarantine`: evicts corrupted blocks from the prefix cache, and has the requests computed again."""

import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any

from canary_core import Event, Kind, Violation, hookimpl
from canary_vllm.pools.pool import Group

SPOILED = frozenset({Kind.BYTES, Kind.LOST_WRITE, Kind.NON_FINITE, Kind.POSITION, Kind.TOKEN, Kind.PREFIX})
"""Findings after which a block must not be read any more."""


class Quarantine:
    """Receives findings in a worker, and acts before the scheduler's next turn: so both must be in one process, as
    without tensor or pipeline parallelism. ``groups``: the guarded ones. ``tell``: names the engine in an event, and
    hands it to all plugins.

    A request computed again keeps its generated tokens. A request waiting for a connector is left alone, and so are
    copies stored elsewhere by a connector.
    """

    def __init__(self, groups: Callable[[], Iterable[Group]], tell: Callable[[Event], None]) -> None:
        self._groups = groups
        self._tell = tell
        self._blocks: dict[int, Violation] = {}
        self._schedulers = 0

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        """Remembers the block."""
        if violation.kind not in SPOILED or violation.slot is None or violation.slot < 0:
            return
        if not self._schedulers:
            reason = "the scheduler is another process; nothing is evicted, and nothing computed again"
            self._tell(Event("quarantine_failed", "warning", {"kind": violation.kind.name.lower(), "reason": reason}))
            return
        for group in self._groups():
            if group.region == violation.region:
                self._blocks.setdefault(violation.slot // group.block, violation)

    def joined(self) -> None:
        """A scheduler runs in the process."""
        self._schedulers += 1

    def left(self) -> None:
        """A scheduler has ended."""
        self._schedulers -= 1

    def act(self, scheduler: Any) -> None:
        """Before ``scheduler`` makes its next batch. With several schedulers the owner of the blocks is unknown."""
        blocks, self._blocks = self._blocks, {}
        if blocks and self._schedulers > 1:
            reason = f"{self._schedulers} engines in this process; nothing is evicted, and nothing computed again"
            self._tell(Event("quarantine_failed", "warning", {"reason": reason}))
            return
        manager = scheduler.kv_cache_manager
        for number, violation in blocks.items():
            block = manager.block_pool.blocks[number]
            cached = block.block_hash is not None
            if cached:
                manager.block_pool.evict_blocks({number})
            having = [r for r in scheduler.running if any(number in ids for ids in manager.get_block_ids(r.request_id))]
            for request in reversed(having):
                preempt(scheduler, request)
            if cached or having:
                about: dict[str, object] = {"kind": violation.kind.name.lower(), "region": violation.region}
                about |= {"slot": violation.slot, "block": number, "evicted": cached}
                about["recomputed"] = [request.request_id for request in having]
                self._tell(Event("quarantined", "warning", about))


def preempt(scheduler: Any, request: Any) -> None:
    """Takes a running request's blocks, so that it is computed again, as vLLM does for `reset_prefix_cache`: output in
    flight is dropped on arrival."""
    scheduler.running.remove(request)
    if "drop_stale_output" in inspect.signature(scheduler._preempt_request).parameters:
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    else:
        scheduler._preempt_request(request, time.monotonic())
        request.async_tokens_to_discard = request.num_output_placeholders
        request.num_output_placeholders = 0
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
