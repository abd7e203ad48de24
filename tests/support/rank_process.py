"""Ranks of a toy engine, each in a process of its own, that compute the same batches: but for a fault in one."""

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import BatchView, RankGroup

FORWARDS = 40


@dataclass
class Fault:
    """What happens ``at`` a forward of ``rank``: see `Rank`."""

    what: str = ""
    rank: int = 2
    at: int = 24
    until: int = 25


@dataclass
class Told:
    """Of one rank: findings, events by name, counts, and the file of the board, whether it is still there."""

    findings: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    kv: int = 0

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for told, fields in self.events if told == name]


class Rank:
    """Serves two requests: their prompts, then token after token, each the last one plus seven."""

    def __init__(self, rank: int, size: int, folder: Path, fault: Fault, options: Mapping[str, Any]) -> None:
        self.rank, self.fault = rank, fault
        given = dict(options)
        heads = given.pop("heads", 1)
        self.engine = ToyEngine(slots=256)
        self.guarded = Guarded(self.engine, **{"rank": rank, "control_dir": str(folder), "ranks_interval": 1, **given})
        self.canary = self.guarded.canary
        if fault.what != "never comes" or rank != fault.rank:
            self.canary.step.ranks.join(RankGroup.of("toy", rank, size, heads))
        self.canary.sampled.follow()
        self.requests = [self.engine.submit("a", [3, 4, 5]), self.engine.submit("b", [6, 7, 8, 9])]

    def hurt(self, what: str, number: int) -> bool:
        return self.fault.what == what and self.rank == self.fault.rank and self.fault.at <= number < self.fault.until

    def serve(self, number: int) -> None:
        """The forward of that number, and its sampler."""
        self.canary.step.ranks.comes()
        if self.hurt("paused", number):
            self.canary.step.pause()
        elif self.fault.what == "paused":
            self.canary.step.resume()
        view = self.view(number)
        self.canary.step.run(lambda: self.forward(view, number), lambda: view)
        for request in self.requests:
            token = (request.tokens[-1] + 7) % 1000
            request.tokens.append(token + self.hurt("sampled", number))
        self.canary.sampled.give(torch.tensor([request.tokens[-1] for request in self.requests]))

    def view(self, number: int) -> BatchView:
        if self.hurt("slots", number):
            self.engine.free.reverse()
        view = replace(self.engine.batch(), expected_tokens=None)
        if self.hurt("tokens", number):
            view.token_ids[0] += 1
        if self.hurt("lengths", number):
            view.prefix_lens[0] -= 1
        return view

    def forward(self, view: BatchView, number: int) -> None:
        self.engine.forward(view)
        if self.hurt("kv", number):
            slot = int(view.tables["full"].write_slots[0])
            self.engine.v[1].view(torch.int16)[slot, 3] ^= 1 << 9
        if self.hurt("all kv", number):
            for half in (self.engine.k, self.engine.v):
                for layer in half:
                    layer[view.tables["full"].write_slots] *= 2


def _run(rank: int, size: int, folder: Path, fault: Fault, options: Mapping[str, Any], barrier: Any, out: Any) -> None:
    torch.set_num_threads(1)
    serving, told = Rank(rank, size, folder, fault, options), Told()
    for number in range(1, FORWARDS + 1):
        # As the sums over all ranks within a forward: none is a forward ahead.
        barrier.wait()
        if fault.what == "dies" and rank == fault.rank and number >= fault.at:
            continue
        serving.serve(number)
    barrier.wait()
    told.files = [path.name for path in folder.glob("ranks-*")]
    barrier.wait()
    serving.canary.drain()
    told.findings = [violation.fields() for violation in serving.guarded.violations]
    told.events = [(event.name, dict(event.fields)) for event in serving.guarded.findings.events]
    told.stats = serving.canary.stats()
    told.kv = hash(tuple(int(t.view(torch.int16).long().sum()) for t in (*serving.engine.k, *serving.engine.v)))
    out.put((rank, told))


def serve(folder: Path, size: int = 3, fault: Fault | None = None, **options: Any) -> list[Told]:
    """What each rank told, by rank."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(size), context.Queue()
    arguments = (size, folder, fault or Fault(), options, barrier, out)
    ranks = [context.Process(target=_run, args=(rank, *arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    told = dict(out.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join()
    return [told[rank] for rank in range(size)]
