"""`Served`: a toy engine that serves as SGLang does with its overlap scheduler, on a pretended device."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from races.accesses import READ, WRITE, Accesses, Numbers
from races.streams import Device, Event
from support.guarded import Guarded
from support.toy import Request, ToyEngine
from torch import Tensor

from canary_core import BatchView, Overlap, ReadTable, SlotTable, StepListener
from canary_core.records import POSITION, STATES, State
from canary_core.runtime.host_copy import HostCopy

SLOT_BYTES = 32
WIDTH = 24
"""Most tokens of a request."""
ROWS = 3


class Served:
    """Requests come, are served in chunks, then token by token, and end; what they had is handed out again at once, the
    last that was freed first. Before a forward the engine fills new tensors and rows of its table; after it the sampler
    gives the next tokens; a batch's tensors are dropped when the next forward was issued. Some of the requests leave
    what they had in a prefix cache. ``scheduler``: the engine prepares the next batch on a stream of its own, while a
    forward runs.

    ``accesses`` looks at what Canary and the engine touch meanwhile. On a GPU Canary's findings are copied to the host;
    here only the reads of that are looked at.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, overlap: Overlap, scheduler: bool = False) -> None:
        self.overlap = overlap
        self.refills = False
        """Whether the lengths of a batch are filled into the tensor of the one before, too."""
        self.brackets = False
        """Whether it calls `Step.before` and `Step.after` itself, as vLLM's plugin does."""
        self.device = Device()
        self.scheduler = self.device.stream("scheduler") if scheduler else self.device.main
        self.accesses = Accesses(self.device, self._read_of_no_use)
        self.engine = ToyEngine(slots=72, layers=1, row_elements=SLOT_BYTES // 2)
        self.guarded = Guarded(self.engine, backend="triton", scrub_budget="64KiB", stats_interval=0, table_interval=2)
        self.canary = self.guarded.canary
        self.canary.sampled.follow()
        self.canary.step.add(Drops(self))
        self.side = self.device.side_stream(monkeypatch)
        workspace = self.canary.step._workspace
        object.__setattr__(workspace, "side", self.side)
        self.kept: list[Tensor] = []
        monkeypatch.setattr(self.side, "reads", lambda *read: self.kept.extend(t for t in read if t is not None))
        # As on a GPU, where not every forward is read.
        self.canary.step._reads_at._forwards = 4
        self._random = random.Random(1)
        self._last: BatchView | None = None
        self.computed = 0
        """Tokens so far."""
        self.told: set[str] = set()
        """Events of slots that there were."""
        self._asked = self._ended = 0
        # With a scheduler's stream the host sees what a forward gave when the next one was issued.
        self._ahead = 1 if scheduler else 0
        self._results: list[tuple[list[Request], Event]] = []
        self._live: list[Request] = []
        self._rows: dict[str, int] = {}
        """Of the table, by request."""
        self._free_rows = list(range(2 * ROWS))
        self._cached: list[tuple[list[int], list[int]]] = []
        for name, tensor in self.engine.pool_tensors().items():
            self.accesses.watch(f"the pool's {name}", tensor)
        self.accesses.watch("the table", self.engine.table)
        for part in ("shared", "states", "proof"):
            for name, tensor in tensors_of(getattr(workspace, part), part):
                self.accesses.watch(name, tensor)
        monkeypatch.setattr(HostCopy, "start", lambda copy, *tensors: self._copied(*tensors))

    def serve(self, forwards: int, until_race: bool = False) -> None:
        """So many, or fewer: ``until_race``, until launches race."""
        with self.accesses.looking():
            for _ in range(forwards):
                if until_race and self.accesses.races:
                    return
                self.forward()

    def forward(self) -> None:
        """One forward, and what comes before and after it."""
        with self.device.on(self.scheduler):
            while len(self._results) > (self._ahead if self._unfinished else 0):
                finished, computed = self._results.pop(0)
                computed.wait(self.scheduler)
                for request in finished:
                    self._end(request)
            while self._may_ask():
                self._ask()
            batch, given = self._batch()
        self.device.wait(self.device.main, self.scheduler)

        def view() -> BatchView:
            if self.canary.step.tables.due:
                self.canary.step.tables.compare([given])
            return batch

        if self.brackets:
            self._between_brackets(batch, view)
        else:
            self.canary.step.run(lambda: self._compute(batch), view, overlap=self.overlap)
        if not self.overlap.after_forward:
            self._move()
        with self.device.on(self.scheduler):
            self.canary.step.follow_check()
        self._sample()
        self._results.append(([r for r in self._live if r.cached == len(r.tokens)], self._computed))
        self._last = batch

    def _between_brackets(self, batch: BatchView, view: Callable[[], BatchView]) -> None:
        step = self.canary.step
        first = step.issues_first(self.overlap)
        if not first:
            step.before(view(), self.overlap)
        self._compute(batch)
        if first:
            with step.beside():
                step.before(view(), self.overlap)
        self.drop()
        step.after()
        step.end()

    def _move(self) -> None:
        """What is cached is moved to other slots, where anything is, and where there is room."""
        if not self._cached or len(self._cached[-1][1]) > self._room():
            return
        tokens, slots = self._cached.pop()
        others = [self.engine.free.pop(0) for _ in slots]
        self.told.add("copy")
        source, destination = (torch.tensor(s, dtype=torch.int64) for s in (slots, others))
        self._tell("alloc", others)
        for pool in (*self.engine.k, *self.engine.v):
            pool.index_copy_(0, destination, pool.index_select(0, source))
        self.canary.slots.copy("full", source, destination)
        self._tell("evict", slots)
        self._tell("park", others)
        self.engine.free[:0] = slots
        self._cached.append((tokens, others))

    def drop(self) -> None:
        """A forward was issued: nobody has the batch before it any more."""
        if self._last is not None:
            last = self._last
            given = [last.prefix_lens, last.new_lens, last.token_ids, last.writers, last.expected_tokens]
            given.append(last.tables["full"].write_slots)
            free = [t for t in given if t is not None and not any(t is kept for kept in self.kept)]
            self.accesses.given_back("a batch's tensors", free)

    def _copied(self, *tensors: Tensor) -> None:
        with self.accesses.launch("the copy to the host"):
            for tensor in tensors:
                self.accesses.touch_whole(READ, tensor)

    def _read_of_no_use(self, launch: str, memory: str, places: Numbers) -> Numbers:
        """The scrub compares slots that it listed in the forward before. Where bytes differ it asks the record, and
        tells nothing of a slot that was freed since: that one may be written meanwhile."""
        if launch != "scrub_kernel" or not memory.startswith("the pool's"):
            return np.zeros(len(places), dtype=bool)
        slots = torch.from_numpy(places // SLOT_BYTES)
        return (self.canary.states["full"].records[slots, POSITION] & STATES - 1 != State.WRITTEN).numpy()

    @property
    def _unfinished(self) -> int:
        return sum(r.cached < len(r.tokens) for r in self.engine.requests)

    def _may_ask(self) -> bool:
        if not self._unfinished:
            self._evict_to(WIDTH)
            return True
        return self._unfinished < ROWS and self._room() >= WIDTH and self._random.random() < 0.6

    def _ask(self) -> None:
        tokens = [self._random.randrange(5, 4000) for _ in range(self._random.randint(3, WIDTH // 2))]
        name = f"request-{self._asked}"
        self._asked += 1
        self._rows[name] = self._free_rows.pop()
        if not self._cached or self._asked % 3 == 0:
            self.engine.submit(name, tokens)
            return
        # A prefix hit on half of what an earlier request has left; nobody needs the rest.
        known, slots = self._cached.pop()
        half = len(slots) // 2
        self._tell("share", slots[:half], name)
        self._tell("evict", slots[half:])
        self.engine.free[:0] = slots[half:]
        request = Request(name, known[:half] + tokens[: WIDTH - half], half, slots[:half])
        self.engine.requests.append(request)
        self._enter(request, 0)

    def _end(self, request: Request) -> None:
        self.engine.requests.remove(request)
        self._free_rows.append(self._rows[request.name])
        self._ended += 1
        if self._ended % 3:
            self._tell("park", request.slots, request.name)
            self._cached.append((request.tokens, request.slots))
        else:
            self._tell("free", request.slots, request.name)
            self.engine.free[:0] = request.slots

    def _tell(self, event: str, slots: list[int], name: str | None = None) -> None:
        self.told.add(event)
        writer = -1 if name is None else self.engine.writers.id(name)
        getattr(self.canary.slots, event)("full", torch.tensor(slots, dtype=torch.int64), writer)

    def _evict_to(self, room: int) -> None:
        while self._room() < room:
            _, slots = self._cached.pop()
            self._tell("evict", slots)
            self.canary.slots.clear("full", torch.tensor(slots))
            self.engine.free[:0] = slots

    def _room(self) -> int:
        return len(self.engine.free) - sum(len(r.tokens) - len(r.slots) for r in self.engine.requests)

    def _batch(self) -> tuple[BatchView, ReadTable]:
        """The next batch, and the slots that attention is given for it."""
        if self.refills and self._last is not None:
            self._fill(self._last.prefix_lens)
        chunk = self._random.choice((1, 1, 6))
        engine, requests = self.engine, self.engine.requests
        engine.news = [min(chunk, len(r.tokens) - r.cached) for r in requests]
        live = [(r, new) for r, new in zip(requests, engine.news, strict=True) if new]
        self._live = [r for r, _ in live]
        for request, new in live:
            request.slots += [engine.free.pop(0) for _ in range(new)]
            self._enter(request, request.cached)
        writes = self._made("write_slots", [s for r, _ in live for s in r.slots[r.cached :]])
        kept = SlotTable(engine.table, self._made("rows", [self._rows[r.name] for r, _ in live]), write_slots=writes)
        width = max(len(r.tokens) for r, _ in live)
        batch = BatchView(
            self._made("prefix_lens", [r.cached for r, _ in live]),
            self._made("new_lens", [new for _, new in live]),
            self._made("token_ids", [t for r, new in live for t in r.tokens[r.cached :][:new]]),
            self._made("writers", [engine.writers.id(r.name) for r, _ in live]),
            {"full": kept},
            expected_tokens=self._made("expected_tokens", [r.tokens + [-1] * (width - len(r.tokens)) for r, _ in live]),
        )
        given = SlotTable(self._made("page table", [r.slots + [0] * (WIDTH - len(r.slots)) for r, _ in live]))
        ends = self._made("ends", [len(r.slots) for r, _ in live])
        begins = self._made("begins", [0] * len(live))
        self.canary.slots.alloc("full", writes)
        return batch, ReadTable("kv_indices", "full", given, kept, begins, ends, batch.writers)

    def _made(self, name: str, values: list[Any]) -> Tensor:
        """A new tensor, int32, which the engine fills."""
        tensor = torch.tensor(values, dtype=torch.int32)
        self.accesses.watch(f"the batch's {name}", tensor)
        self._fill(tensor)
        return tensor

    def _enter(self, request: Request, first: int) -> None:
        """The table gets the request's slots from position ``first`` on."""
        row = self.engine.table[self._rows[request.name]]
        row[first : len(request.slots)] = torch.tensor(request.slots[first:], dtype=torch.int32)

    def _fill(self, tensor: Tensor) -> None:
        with self.accesses.launch("the engine"):
            self.accesses.touch_whole(WRITE, tensor)

    def _compute(self, batch: BatchView) -> None:
        """Reads what attention reads, then writes."""
        for request in self._live:
            for pool in (*self.engine.k, *self.engine.v):
                pool[torch.tensor(request.slots[: request.cached], dtype=torch.int64)]
        self.computed += batch.tokens
        self.engine.forward(batch)
        self._computed = Event()
        self._computed.record(self.device.now)

    def _sample(self) -> None:
        """Each row's next token; no one's where it has none left."""
        following = [r.tokens[r.cached] if r.cached < len(r.tokens) else -1 for r in self._live]
        self.canary.sampled.give(torch.tensor(following, dtype=torch.int64))


class Drops(StepListener):
    """The earliest moment at which nobody but the device may still need the tensors of the batch before."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def after(self, batch: Any, view: BatchView | None) -> None:
        self._served.drop()


def tensors_of(thing: Any, name: str, depth: int = 6) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that ``thing`` has, and what it has, with its path."""
    if isinstance(thing, Tensor):
        yield name, thing
    elif depth and isinstance(thing, dict):
        for key, value in thing.items():
            yield from tensors_of(value, f"{name}.{key}", depth - 1)
    elif depth and isinstance(thing, (list, tuple)):
        for n, value in enumerate(thing):
            yield from tensors_of(value, f"{name}.{n}", depth - 1)
    elif depth and type(thing).__module__.startswith("canary_core"):
        slots = {key for kind in type(thing).__mro__ for key in getattr(kind, "__slots__", ())}
        for key in sorted({*getattr(thing, "__dict__", {}), *slots}):
            yield from tensors_of(getattr(thing, key, None), f"{name}.{key}", depth - 1)
