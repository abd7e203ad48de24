"""``python -m benchmarks.flips``: how long a flipped bit goes unseen, with the default settings and without an engine.

A pool of Llama-8B's shape, partly full, and decodes at an engine's pace: each forward writes the last token's K and V
of every running request, and then only takes time. Meanwhile bits flip in slots of running requests and in parked ones,
and the clock runs until the finding is told. It imports nothing of Canary but what is public, so that it runs on an
older one as well, for comparison: ``PYTHONPATH=/older/checkout/src python benchmarks/flips.py``.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from canary_core import (
    BatchView,
    Canary,
    CanaryConfig,
    Kind,
    KVSource,
    Overlap,
    Region,
    SlotTable,
    Violation,
    hookimpl,
    private_hooks,
)

REGION = "kv"
PREFILL_TOKENS = 8192
APART_S = 0.2
"""Between two flips: they don't wait for each other."""
PROFILED_STEPS = 128
SORTS = ("running", "parked")


@dataclass(frozen=True, slots=True)
class Shape:
    """A pool of ``pool_bytes`` in ``layers`` of K and V of ``row_bytes`` a slot. ``full`` of its slots are written,
    ``parked`` of these are the prefix cache's; ``scattered``: in no order, else side by side."""

    pool_bytes: int = 73 * 10**9
    layers: int = 32
    row_bytes: int = 2048
    full: float = 0.2
    parked: float = 0.5
    request_tokens: int = 2048
    step_s: float = 9e-3
    scattered: bool = True

    @property
    def slots(self) -> int:
        """Of the pool, the padding slot among them."""
        return self.pool_bytes // (2 * self.layers * self.row_bytes)


@dataclass(slots=True, eq=False)
class Flip:
    """One bit. ``at_s``, ``told_s``: on the clock of `time.perf_counter`; None: not told yet."""

    sort: str
    slot: int
    source: int
    element: int
    bit: int
    at_s: float = 0.0
    told_s: float | None = None


class Told:
    """A plugin that notes when a finding is told."""

    def __init__(self) -> None:
        self.at_s: dict[tuple[int | None, str | None], float] = {}
        self.others: list[str] = []

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        """A finding is told."""
        if violation.kind is Kind.BYTES:
            self.at_s.setdefault((violation.slot, violation.source), time.perf_counter())
        else:
            self.others.append(str(violation))


@dataclass(slots=True, eq=False)
class Forward:
    """A batch and what it does to the pool: ``slots`` get ``rows``, other ones each time."""

    batch: BatchView
    slots: Tensor
    rows: Tensor
    run: Callable[[], None] = field(default=lambda: None)


class Decodes:
    """Forwards of the running requests of a pool under guard; each rewrites its requests' last position."""

    def __init__(self, shape: Shape, device: torch.device, **settings: object) -> None:
        torch.manual_seed(0)
        self.shape, self.device, self.told = shape, device, Told()
        self.pools = [
            torch.zeros(shape.slots, shape.row_bytes // 2, dtype=torch.int16, device=device)
            for _ in range(2 * shape.layers)
        ]
        self.sources = tuple(
            KVSource(pool, "kv"[i % 2], i // 2, shape.row_bytes, shape.row_bytes, dtype=torch.bfloat16)
            for i, pool in enumerate(self.pools)
        )
        config = CanaryConfig.load(**{"silence_s": 0, "log_level": "error", "stats_interval": 0, **settings})
        region = Region(REGION, shape.slots, self.sources, null_slot=0)
        self.canary = Canary([region], config, hooks=private_hooks(self.told))
        order = torch.randperm(shape.slots - 1, device=device) if shape.scattered else None
        order = 1 + (torch.arange(shape.slots - 1, device=device) if order is None else order)
        requests = max(int(shape.slots * shape.full) // shape.request_tokens, 2)
        self.table = order[: requests * shape.request_tokens].view(requests, shape.request_tokens)
        parked = int(requests * shape.parked)
        self.rows = {"running": slice(0, requests - parked), "parked": slice(requests - parked, requests)}
        self._prefill(requests)
        if parked:
            self.canary.slots.park(REGION, self.table[self.rows["parked"]].flatten())
        self.decode = self._decode(requests - parked)
        self._since = torch.cuda.Event() if device.type == "cuda" else None

    def step(self) -> None:
        """One decode; the host is no more than one forward ahead."""
        if self._since is not None:
            self._since.synchronize()
            self._since.record()
        self.canary.step.run(self.decode.run, lambda: self.decode.batch, overlap=Overlap.ALL)

    def flip(self, flip: Flip) -> None:
        """Flips the bit, and waits until that is done."""
        stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        with torch.cuda.stream(stream):
            value = 1 << flip.bit if flip.bit < 15 else -(1 << 15)
            self.pools[flip.source][flip.slot, flip.element] ^= value
        if stream is not None:
            stream.synchronize()

    def any_flip(self, rng: random.Random, sort: str) -> Flip:
        """Of a slot that no decode writes."""
        rows = range(*self.rows[sort].indices(len(self.table)))
        slot = int(self.table[rng.choice(rows), rng.randrange(self.shape.request_tokens - 1)])
        element = rng.randrange(self.shape.row_bytes // 2)
        return Flip(sort, slot, rng.randrange(len(self.pools)), element, rng.randrange(16))

    def _batch(self, rows: slice, first: int, end: int) -> BatchView:
        count, device = len(self.table[rows]), self.device

        def full(value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int32, device=device)

        return BatchView(
            prefix_lens=full(first),
            new_lens=full(end - first),
            token_ids=torch.randint(0, 128_000, (count * (end - first),), device=device),
            writers=torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device),
            tables={REGION: SlotTable(self.table[rows], write_slots=self.table[rows, first:end].flatten().clone())},
        )

    def _store(self, slots: Tensor, rows: Tensor) -> None:
        for pool in self.pools:
            pool.index_copy_(0, slots, rows)

    def _prefill(self, requests: int) -> None:
        tokens = self.shape.request_tokens
        together = max(PREFILL_TOKENS // tokens, 1)
        for first in range(0, requests, together):
            rows = slice(first, min(first + together, requests))
            slots = self.table[rows].flatten()
            # Exponents that are no infinity's.
            values = torch.randint(0, 0x7F00, (len(slots), self.shape.row_bytes // 2), device=self.device).short()
            view = self._batch(rows, 0, tokens)
            self.canary.step.run(partial(self._store, slots, values), lambda v=view: v)
        self.canary.drain()

    def _decode(self, running: int) -> Forward:
        rows, last = slice(0, running), self.shape.request_tokens - 1
        slots = self.table[rows, last].contiguous()
        values = torch.randint(0, 0x7F00, (running, self.shape.row_bytes // 2), device=self.device).short()
        made = Forward(self._batch(rows, last, last + 1), slots, values)

        def store() -> None:
            # Other bytes each time, else it would be a lost write.
            made.rows ^= 1
            self._store(made.slots, made.rows)

        if self.device.type == "cpu":

            def forward() -> None:
                store()
                time.sleep(self.shape.step_s)

            made.run = forward
            return made
        cycles = int(self.shape.step_s * _cycles_per_s())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            store()
            torch.cuda._sleep(cycles)
        made.run = graph.replay
        return made


def measure(decodes: Decodes, flips: int, most_s: float, seed: int = 0) -> dict[str, Any]:
    """Flips so many bits of each sort, and waits until all are told, no longer than ``most_s``."""
    rng = random.Random(seed)
    _run_for(decodes, 5 * APART_S)
    began, steps = time.perf_counter(), 0
    while "live_period_s" not in decodes.canary.scrub_stats() and time.perf_counter() - began < most_s / 4:
        decodes.step()
    sorts = [sort for sort in SORTS if len(decodes.table[decodes.rows[sort]])]
    due = [decodes.any_flip(rng, sort) for _ in range(flips) for sort in sorts]
    every, waiting, bounds = list(due), [], [0.0]
    began, next_s = time.perf_counter(), 0.0
    while (due or waiting) and time.perf_counter() - began < most_s:
        if due and time.perf_counter() - began >= next_s:
            flip = due.pop(0)
            decodes.flip(flip)
            flip.at_s = time.perf_counter()
            waiting.append(flip)
            next_s += APART_S * (0.5 + rng.random()) / len(sorts)
        decodes.step()
        steps += 1
        bounds.append(decodes.canary.scrub_stats().get("live_period_s", 0.0))
        for flip in list(waiting):
            flip.told_s = decodes.told.at_s.get((flip.slot, decodes.sources[flip.source].name))
            if flip.told_s is not None:
                waiting.remove(flip)
    step_s = (time.perf_counter() - began) / max(steps, 1)
    found: dict[str, Any] = {
        "step_ms": step_s * 1e3, "live_period_s": max(bounds), "stats": decodes.canary.scrub_stats(),
        "other_findings": decodes.told.others, "unasked": _unasked(decodes.told, every, decodes.sources),
    }  # fmt: skip
    for sort in sorts:
        own = [flip for flip in every if flip.sort == sort]
        seconds = sorted(flip.told_s - flip.at_s for flip in own if flip.told_s is not None)
        found[sort] = {"flips": len(own), "told": len(seconds), "seconds": seconds}
    return found


def scrub_us(decodes: Decodes) -> dict[str, float]:
    """Device time of the scrub's launches: µs of one, and µs a forward on average."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED_STEPS):
            decodes.step()
        torch.cuda.synchronize()
    times = [e.time_range.elapsed_us() for e in profiled.events() if "scrub_kernel" in str(e.name)]
    if not times:
        return {}
    return {"launches": len(times), "one_us": statistics.median(times), "forward_us": sum(times) / PROFILED_STEPS}


def show(found: dict[str, Any], console: Console) -> None:
    """The table."""
    table = Table("bits flipped in slots that are", "flips", "told", "median, s", "most, s", title="seconds until told")
    for sort in SORTS:
        if sort in found:
            one = found[sort]
            s = one["seconds"] or [float("nan")]
            table.add_row(sort, str(one["flips"]), str(one["told"]), f"{statistics.median(s):.2f}", f"{max(s):.2f}")
    console.print(table)
    stats = ", ".join(f"{name} {value:.4g}" for name, value in found["stats"].items())
    console.print(f"forwards of {found['step_ms']:.2f} ms; {stats}; live_period_s at most {found['live_period_s']:.2f}")
    if found.get("scrub"):
        console.print("scrub_kernel: " + ", ".join(f"{name} {value:.1f}" for name, value in found["scrub"].items()))
    wrong = [*found["other_findings"], *found["unasked"]]
    console.print(f"findings that nobody asked for: {len(wrong)} {wrong[:3]}")


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; 1 if a bit was not told, or anything else was."""
    usual = Shape()
    p = argparse.ArgumentParser(prog="python -m benchmarks.flips", description=__doc__)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--pool-gb", type=float, default=usual.pool_bytes / 1e9, help="bytes of the pool, in 10^9")
    p.add_argument("--full", type=float, default=usual.full, help="share of the slots that are written")
    p.add_argument("--parked", type=float, default=usual.parked, help="share of these that the prefix cache keeps")
    p.add_argument("--layers", type=int, default=usual.layers)
    p.add_argument("--request-tokens", type=int, default=usual.request_tokens)
    p.add_argument("--step-ms", type=float, default=usual.step_s * 1e3)
    p.add_argument("--in-order", action="store_true", help="requests' slots lie side by side")
    p.add_argument("--flips", type=int, default=24, help="of each sort")
    p.add_argument("--most-s", type=float, default=45, help="longest wait for all of them")
    p.add_argument("--budget", help="CANARY_SCRUB_BUDGET, if not the default")
    p.add_argument("--json", metavar="PATH", help="write the raw numbers")
    args = p.parse_args(arguments)
    shape = Shape(
        int(args.pool_gb * 1e9), args.layers, full=args.full, parked=args.parked, request_tokens=args.request_tokens,
        step_s=args.step_ms / 1e3, scattered=not args.in_order,
    )  # fmt: skip
    settings = {"scrub_budget": args.budget} if args.budget else {}
    decodes = Decodes(shape, torch.device(args.device), **settings)
    found = measure(decodes, args.flips, args.most_s)
    if args.device != "cpu":
        found["scrub"] = scrub_us(decodes)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    show(found, Console(width=120))
    missed = sum(found[sort]["flips"] - found[sort]["told"] for sort in SORTS if sort in found)
    return 1 if missed or found["other_findings"] or found["unasked"] else 0


def _run_for(decodes: Decodes, seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        decodes.step()


def _unasked(told: Told, flips: list[Flip], sources: tuple[KVSource, ...]) -> list[str]:
    asked = {(flip.slot, sources[flip.source].name) for flip in flips}
    return [f"slot {slot} of {source}" for slot, source in told.at_s if (slot, source) not in asked]


def _cycles_per_s() -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10_000_000)
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return 100_000_000 / (begin.elapsed_time(end) / 1e3)


if __name__ == "__main__":
    sys.exit(main())
