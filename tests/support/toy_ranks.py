"""Ranks of a toy engine that compute the same batches, but for a fault in one: in one process, or in one each."""

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import BatchView, RankGroup

FORWARDS = 40


@dataclass(frozen=True)
class Fault:
    """``what`` happens in ``rank``, in the forwards from ``at`` up to ``until``: see `Rank`."""

    what: str = ""
    rank: int = 2
    at: int = 24
    until: int = 25


@dataclass
class Told:
    """By one rank: findings, events with their fields, counts, and what its pool holds at the end."""

    findings: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    pool: list[int] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [found for found in self.findings if found["kind"] == kind]

    def event(self, name: str) -> list[dict[str, Any]]:
        return [fields for told, fields in self.events if told == name]


class Rank:
    """Serves two requests: their prompts, then token after token, each the last one plus seven. ``options``: settings,
    ``heads`` of the model, and ``slots`` of the group."""

    def __init__(self, rank: int, size: int, folder: Path, fault: Fault, options: Mapping[str, Any]) -> None:
        self.rank, self.fault = rank, fault
        given = {"rank": rank, "control_dir": str(folder), "ranks_interval": 1, **options}
        heads, slots = given.pop("heads", 1), given.pop("slots", True)
        self.engine = ToyEngine(slots=256)
        self.guarded = Guarded(self.engine, **given)
        self.canary = self.guarded.canary
        if self.canary.step.ranks is not None and not self.here("never comes"):
            self.canary.step.ranks.join(RankGroup.of(f"toy in {folder}", rank, size, heads, slots))
        self.canary.sampled.follow()
        self.requests = [self.engine.submit("a", [3, 4, 5]), self.engine.submit("b", [6, 7, 8, 9])]

    def here(self, what: str) -> bool:
        return self.fault.what == what and self.rank == self.fault.rank

    def now(self, what: str, number: int) -> bool:
        return self.here(what) and self.fault.at <= number < self.fault.until

    def serve(self, number: int) -> None:
        """The forward of that number, and its sampler."""
        if self.now("dead", number):
            return
        if self.canary.step.ranks is not None:
            self.canary.step.ranks.comes(not self.now("not alike", number))
        if self.here("paused"):
            (self.canary.step.pause if self.now("paused", number) else self.canary.step.resume)()
        view = self.view(number)
        self.canary.step.run(lambda: self.forward(view, number), lambda: view)
        for request in self.requests:
            request.tokens.append((request.tokens[-1] + 7) % 1000 + self.now("sampled", number))
        self.canary.sampled.give(torch.tensor([request.tokens[-1] for request in self.requests]))

    def view(self, number: int) -> BatchView:
        if self.now("slots", number):
            self.engine.free.reverse()
        view = replace(self.engine.batch(), expected_tokens=None)
        if self.now("tokens", number):
            view.token_ids[0] += 1
        if self.now("lengths", number):
            view.prefix_lens[0] -= 1
        return view

    def forward(self, view: BatchView, number: int) -> None:
        self.engine.forward(view)
        slots = view.tables["full"].write_slots
        assert slots is not None
        if self.now("kv", number):
            self.engine.v[1].view(torch.int16)[slots[0], 3] ^= 1 << 9
        if self.now("rounding", number):
            for tensor in (*self.engine.k, *self.engine.v):
                tensor[slots] *= 1.01

    def told(self) -> Told:
        """At the end."""
        self.canary.drain()
        findings = self.guarded.findings
        pool = [int(t.view(torch.int16).long().sum()) for t in (*self.engine.k, *self.engine.v)]
        events = [(event.name, dict(event.fields)) for event in findings.events]
        told = Told([violation.fields() for violation in findings.violations], events, self.canary.stats(), pool)
        self.canary.close()
        return told


def serve(
    folder: Path, size: int = 3, fault: Fault = Fault(), odd: Mapping[str, Any] | None = None, **options: Any
) -> list[Told]:
    """What each rank of this process told, by rank. ``odd``: other options of the last one."""
    given = [*[options] * (size - 1), {**options, **(odd or {})}]
    ranks = [Rank(rank, size, folder, fault, own) for rank, own in enumerate(given)]
    for number in range(1, FORWARDS + 1):
        for rank in ranks:
            rank.serve(number)
    return [rank.told() for rank in ranks]


def serve_apart(folder: Path, size: int, fault: Fault, **options: Any) -> list[Told]:
    """The same in a process for each rank. ``alone``, among the options: each as if started from a shell."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(size), context.Queue()
    ranks = [
        context.Process(target=_run, args=(rank, size, folder, fault, options, barrier, out), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    told = dict(out.get(timeout=300) for _ in ranks)
    for process in ranks:
        process.join()
    return [told[rank] for rank in range(size)]


def _run(rank: int, size: int, folder: Path, fault: Fault, options: Mapping[str, Any], barrier: Any, out: Any) -> None:
    torch.set_num_threads(1)
    if options.get("alone"):
        multiprocessing.current_process().authkey = os.urandom(32)
    serving = Rank(rank, size, folder, fault, {name: value for name, value in options.items() if name != "alone"})
    for number in range(1, FORWARDS + 1):
        # As the sums over all ranks within a forward: none is a forward ahead.
        barrier.wait(timeout=200)
        serving.serve(number)
    barrier.wait(timeout=200)
    out.put((rank, serving.told()))
