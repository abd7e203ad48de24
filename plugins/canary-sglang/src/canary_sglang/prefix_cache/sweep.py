"""`PrefixSweep`: checks every node of SGLang's prefix cache, locked or not, for contradictions in the cache and between
the cache and Canary's records.

A sweep walks the tree while the scheduler does not change it: before the issue of a batch, or in idle time, `PER_STEP`
of the tree a step. The records of the nodes' slots are read on the forwards' stream before the batch, so after every
forward that wrote them, and compared once arrived on the host. A sweep is reported with its last results.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from canary_core import Canary, Event, FreeList, Kind, Level, Phase, RecordSweep, StepListener, SweepResult, Violation
from canary_sglang.compat import allocators
from canary_sglang.prefix_cache import tree
from canary_sglang.prefix_cache.host_nodes import check_host_nodes
from canary_sglang.prefix_cache.tree import Broken, RustTree
from canary_sglang.prefix_cache.walk import FlatWalk, Limit, NodeWalk, Piece, Walk
from canary_sglang.transfer.hicache import ParkedRecords

PER_STEP = Limit(nodes=64, slots=4096)
"""Most of the tree walked before one forward."""

IDLE_FACTOR = 16
"""While the engine idles, so many times `PER_STEP` are walked at once."""

MOST_IN_FLIGHT = 4
"""Most pieces with records on their way to the host; the walk waits for an arrival then."""

MOST_SUSPECTS = 16
"""Most pairs of nodes walked again. They had the same slot, but at different moments. More are counted as
``suspects_left``."""


@dataclass(slots=True)
class _Sweep:
    """The state of a sweep between begin and report."""

    walk: Walk
    cache: Any
    began: int
    slots: int = 0
    host_slots: int = 0
    unknown_slots: int = 0
    findings: int = 0
    waiting: "_WalkedPiece | None" = None
    issued: deque["_WalkedPiece"] = field(default_factory=deque)
    suspects: list[tuple[Any, Any]] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    owner: torch.Tensor | None = None
    """For each slot, the index in ``seen`` of the last node with it, -1 for none."""


@dataclass(frozen=True, slots=True)
class _WalkedPiece:
    """A piece of the tree, and the allocator's free pages at the time of the walk. ``ready``: event after which their
    tensors are valid."""

    piece: Piece
    free: tuple[FreeList, ...]
    ready: torch.cuda.Event | None


class PrefixSweep(StepListener):
    """Sweeps one session's cache, once every ``CANARY_SWEEP_INTERVAL`` batches. ``vocabulary``: number of tokens of the
    model. ``parked``: gives the records of KV in host memory, None where there are none."""

    def __init__(self, canary: Canary, vocabulary: int, parked: Callable[[], ParkedRecords | None]) -> None:
        self._canary = canary
        self._interval = canary.config.sweep_interval
        self._told: set[str] = set()
        self._batches = 0
        self._due = self._interval
        self._records = RecordSweep(canary, vocabulary)
        self._vocabulary = vocabulary
        self._parked = parked
        self._sweep: _Sweep | None = None
        self._scheduler: Any = None

    @property
    def on(self) -> bool:
        """Whether the engine's cache is swept."""
        return bool(self._interval) and self._canary.enabled

    def before_batch(self, scheduler: Any) -> None:
        """To be called before the scheduler issues a batch: walks the next piece, and reports arrived results."""
        if self.on:
            self._scheduler = scheduler
            self._batches += 1
            with self._canary.guard("PrefixSweep.before_batch"):
                self._advance(scheduler, False)

    def begin(self, batch: Any) -> None:
        """Starts reading the records of the walked piece: before the batch's forward, on its stream."""
        if self._sweep is not None and self._sweep.waiting is not None and self.on:
            self._canary.step.join()
            self._issue(self._sweep, self._sweep.waiting)

    def idle(self) -> None:
        """Walks a large piece of a due or begun sweep."""
        if self.on and self._scheduler is not None:
            self._advance(self._scheduler, True)
            self.begin(None)

    def close(self) -> None:
        """Reports arrived results."""
        if self.on:
            self._collect()

    def _advance(self, scheduler: Any, idle: bool) -> None:
        self._collect()
        sweep = self._sweep
        if sweep is not None and (sweep.waiting is not None or sweep.cache is not scheduler.tree_cache):
            # The last batch had no forward, or the cache is another one; the tree has changed since it was walked.
            self._abandon()
            sweep = None
        if sweep is None and self._batches >= self._due:
            sweep = self._begin(scheduler.tree_cache, idle)
        if sweep is None or len(sweep.issued) >= MOST_IN_FLIGHT:
            return
        piece = self._walk(sweep, idle)
        if piece is not None:
            ready = None
            if self._device.type == "cuda":
                # Slots and free lists are made on the scheduler's stream and read on the forwards' stream.
                ready = torch.cuda.Event()
                ready.record()
            free = tuple(allocators.free_lists(scheduler.token_to_kv_pool_allocator))
            sweep.waiting = _WalkedPiece(piece, free, ready)

    def _begin(self, cache: Any, idle: bool) -> _Sweep | None:
        """A new sweep; None if the cache can't be swept, or not now."""
        kind = tree.tree_of(cache)
        if isinstance(kind, RustTree) and self._device.type == "cuda" and not idle:
            # Its walk waits for the device, and no batch should wait for that.
            return None
        self._due = self._batches + self._interval
        if isinstance(kind, str):
            if kind not in self._told:
                self._told.add(kind)
                level: Level = "info" if kind == tree.OFF else "warning"
                self._canary.tell(Event("sweep_unavailable", level, {"reason": kind}))
            return None
        walk = FlatWalk(kind, self._device) if isinstance(kind, RustTree) else NodeWalk(kind)
        self._sweep = _Sweep(walk, cache, self._batches)
        return self._sweep

    def _walk(self, sweep: _Sweep, idle: bool) -> Piece | None:
        """The next piece, None if there is none now."""
        if sweep.walk.ended:
            pairs, sweep.suspects = sweep.suspects, []
            return sweep.walk.again([node for pair in pairs for node in pair]) if pairs else None
        limit = PER_STEP.times(IDLE_FACTOR) if idle else PER_STEP
        if isinstance(sweep.walk, FlatWalk) and self._device.type != "cuda":
            # It changes between two pieces, so it is walked at once; there is no device to wait for.
            limit = Limit(nodes=1 << 62, slots=1 << 62)
        piece = sweep.walk.next(limit, self._batches)
        parked = self._parked()
        if parked is not None:
            broken, compared = check_host_nodes(parked, piece.host_runs, self._vocabulary)
            piece.broken += broken
            sweep.host_slots += compared
        return piece

    def _issue(self, sweep: _Sweep, waiting: _WalkedPiece) -> None:
        sweep.waiting = None
        if waiting.ready is not None:
            waiting.ready.wait()
        if self._records.issue(waiting.piece.runs, waiting.free):
            sweep.issued.append(waiting)
        else:
            self._report(sweep, waiting.piece, None)

    def _collect(self) -> None:
        sweep = self._sweep
        if sweep is None:
            return
        for result in self._records.collect():
            self._report(sweep, sweep.issued.popleft().piece, result)
        if sweep.walk.ended and sweep.waiting is None and not sweep.issued and not sweep.suspects:
            self._tell(sweep)
            self._sweep = None

    def _report(self, sweep: _Sweep, piece: Piece, result: SweepResult | None) -> None:
        found = [self._violation(broken) for broken in piece.broken]
        sweep.findings += len(found)
        if result is not None:
            if piece.nodes:
                twice = self._twice(piece, result)
                found += twice
                sweep.findings += len(twice)
                if not piece.again:
                    self._note_owners(sweep, piece, result)
            if not piece.again:
                found += result.findings
                sweep.findings += result.found
                sweep.slots += result.slots
                sweep.unknown_slots += result.unknown
        self._canary.report(found)

    def _twice(self, piece: Piece, result: SweepResult) -> list[Violation]:
        return [
            self._violation(
                Broken(
                    piece.nodes[one].id, "slot_twice", f"slot {slot} is in node {piece.nodes[other].id} too", slot=slot
                )
            )
            for one, other, slot in result.shared
            if piece.nodes[one] is not piece.nodes[other]
        ]

    def _note_owners(self, sweep: _Sweep, piece: Piece, result: SweepResult) -> None:
        """Remembers which node has each slot. If another node had the slot before, the two are only suspects, since the
        slot may have moved in between."""
        if sweep.owner is None:
            slots = max(region.slots * region.tokens_per_slot for region in self._canary.regions.values())
            slots = max([slots, *(len(r.slot_map) for r in self._canary.regions.values() if r.slot_map is not None)])
            sweep.owner = torch.full((slots,), -1, dtype=torch.int32, device="cpu")
        base = len(sweep.seen)
        sweep.seen += piece.nodes
        lengths = torch.tensor([len(run) for run in piece.runs], device="cpu")
        index = torch.repeat_interleave(torch.arange(base, len(sweep.seen), dtype=torch.int32, device="cpu"), lengths)
        inside = (result.numbers >= 0) & (result.numbers < len(sweep.owner))
        numbers, index = result.numbers[inside], index[inside]
        before = sweep.owner[numbers]
        clash = (before >= 0).nonzero()[:, 0]
        for one, other in {(int(before[i]), int(index[i])) for i in clash[: 1 << 12].tolist()}:
            pair = sweep.seen[one], sweep.seen[other]
            if pair[0] is pair[1]:
                continue
            if len(sweep.suspects) < MOST_SUSPECTS:
                sweep.suspects.append(pair)
            else:
                self._canary.count("suspects_left")
        sweep.owner[numbers] = index

    def _violation(self, broken: Broken) -> Violation:
        return Violation(
            kind=Kind.CACHE_STRUCTURE,
            region=broken.component,
            phase=Phase.SWEEP,
            step=self._canary.forwards,
            slot=broken.slot,
            node=broken.node,
            rule=broken.rule,
            detail=broken.detail,
            rank=self._canary.config.rank,
        )

    def _tell(self, sweep: _Sweep) -> None:
        walk = sweep.walk
        fields = {
            "cache": type(sweep.cache).__name__,
            "nodes": walk.nodes,
            "tokens": walk.tokens,
            "slots": sweep.slots,
            "host_slots": sweep.host_slots,
            "unknown_slots": sweep.unknown_slots,
            "on_host": walk.on_host,
            "vanished": walk.vanished,
            "sizes_checked": walk.sizes_checked,
            "steps": self._batches - sweep.began,
            "findings": sweep.findings,
        }
        self._canary.tell(Event("sweep", "warning" if sweep.findings else "info", fields))
        self._canary.count("sweeps")
        for name in ("nodes", "slots"):
            self._canary.count(f"swept_{name}", int(str(fields[name])))
        self._canary.count("sweep_findings", sweep.findings)

    def _abandon(self) -> None:
        """Ends a sweep without a report. Records on their way are not compared."""
        self._canary.count("sweeps_abandoned")
        self._sweep = None
        self._records.drop()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._canary.regions.values())).device
