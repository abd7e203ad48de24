"""A toy engine as real ones are built: static batch buffers padded to capacity, a forward of torch ops with attention
through a slot table, captured in a CUDA graph together with Canary's bracket. Faults inside a replay are switches in
device memory. On the CPU the same bracket runs eagerly, so that its own logic is tested there."""

import random
import warnings
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from canary_core import (
    BatchView,
    Canary,
    CanaryConfig,
    KVSource,
    Overlap,
    Region,
    SlotTable,
    Verdict,
    Violation,
    Writers,
    hookimpl,
    private_hooks,
)
from canary_core.testing import Findings

WIDTH = 48
"""Most tokens of a request."""
SLOTS = 160
LAYERS = 2
CHANNELS = 32
VOCABULARY = 5000


@dataclass(frozen=True)
class Size:
    """Capacity of the static batch."""

    rows: int = 6
    tokens: int = 40


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]
    table_row: int
    slots: list[int] = field(default_factory=list)
    cached: int = 0


@dataclass
class Step:
    """One forward as the host plans it; ``rows`` has None for padding."""

    rows: list[Request | None]
    new: list[int]

    @property
    def live(self) -> list[tuple[Request, int]]:
        """(request, position) of each new token, in batch order."""
        return [(r, r.cached + i) for r, n in zip(self.rows, self.new, strict=True) if r for i in range(n)]


class Traffic:
    """Requests that come and go over `SLOTS` slots, of which 0 is padding: chunked prefill, decode, prefixes shared
    with running and finished requests, eviction of finished ones. A seed gives the same traffic on every device."""

    def __init__(self, size: Size, seed: int) -> None:
        self.size = size
        self.random = random.Random(seed)
        self.running: list[Request] = []
        self.finished: deque[Request] = deque()
        self.free = list(range(1, SLOTS))
        self.users = [0] * SLOTS
        self.table_rows = list(range(size.rows + 2))
        self.submitted = 0

    def next(self) -> Step:
        """Plans a forward and hands out its slots."""
        for request in [r for r in self.running if r.cached == len(r.tokens)]:
            self._end(request)
        most = min(self.size.rows, 6)
        while len(self.running) < most and self.random.random() < 0.5:
            self._admit()
        left, rows = min(self.size.tokens, 40), []
        for request in self.running:
            want = len(request.tokens) - request.cached
            prompt = request.cached < len(request.tokens) // 2
            n = min(want, self.random.randint(2, 12) if prompt else 1, left, self._room())
            left -= n
            for _ in range(n):
                request.slots.append(self._take())
            rows.append((request, n))
        if rows and not any(n for _, n in rows):
            # All slots belong to running requests: the last one gives way, or none would ever go on.
            self._end(self.running[-1])
            return self.next()
        rows += [(None, 0)] * (self.size.rows - len(rows))
        self.random.shuffle(rows)
        return Step([r for r, _ in rows], [n for _, n in rows])

    def commit(self, step: Step) -> None:
        """The forward was issued."""
        for request, n in zip(step.rows, step.new, strict=True):
            if request:
                request.cached += n

    def _end(self, request: Request) -> None:
        self.running.remove(request)
        self.finished.append(request)
        self.table_rows.append(request.table_row)

    def _admit(self) -> None:
        length = self.random.randint(3, WIDTH)
        tokens = [self.random.randrange(VOCABULARY) for _ in range(length)]
        request = Request(f"request-{self.submitted}", tokens, self.table_rows.pop(0))
        self.submitted += 1
        others = [r for r in (*self.running, *self.finished) if r.cached]
        if others and self.random.random() < 0.4:
            other = self.random.choice(others)
            shared = self.random.randint(1, min(other.cached, length - 1))
            request.tokens[:shared] = other.tokens[:shared]
            request.slots, request.cached = other.slots[:shared], shared
            for slot in request.slots:
                self.users[slot] += 1
        self.running.append(request)

    def _room(self) -> int:
        return len(self.free) + sum(self.users[s] == 1 for r in self.finished for s in r.slots)

    def _take(self) -> int:
        while not self.free:
            for slot in self.finished.popleft().slots:
                self.users[slot] -= 1
                if not self.users[slot]:
                    self.free.append(slot)
        slot = self.free.pop(0)
        self.users[slot] = 1
        return slot


class Model:
    """Static buffers, pools and the forward. ``lost`` and ``nan``, bool ``[layers, 2]``, spoil the store of one layer
    and half; ``stray_mask``, int16 ``[layers, 2]``, is XORed to the row of slot ``stray_slot`` after the forward."""

    def __init__(self, size: Size, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def random_values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.embedding, self.place = random_values(VOCABULARY, CHANNELS), random_values(WIDTH, CHANNELS)
        self.weights = random_values(LAYERS, 2, CHANNELS, CHANNELS) / CHANNELS**0.5
        self.pools = [[numbers(SLOTS, CHANNELS, dtype=torch.bfloat16) for _ in "kv"] for _ in range(LAYERS)]
        self.prefix_lens, self.new_lens = numbers(size.rows, dtype=torch.int32), numbers(size.rows, dtype=torch.int32)
        self.writers, self.table_rows = numbers(size.rows, dtype=torch.int32), numbers(size.rows)
        self.expected = numbers(size.rows, WIDTH, dtype=torch.int32)
        self.table = numbers(size.rows + 2, WIDTH, dtype=torch.int32)
        self.token_ids, self.positions = numbers(size.tokens), numbers(size.tokens)
        self.token_rows, self.write_slots = numbers(size.tokens), numbers(size.tokens)
        self.lost, self.nan = numbers(LAYERS, 2, dtype=torch.bool), numbers(LAYERS, 2, dtype=torch.bool)
        self.stray_slot, self.stray_mask = numbers(1), numbers(LAYERS, 2, dtype=torch.int16)
        self.columns = torch.arange(WIDTH, device=device)
        self.output = numbers(size.tokens, CHANNELS, dtype=torch.bfloat16)

    def region(self) -> Region:
        row = CHANNELS * 2
        return Region(
            "full",
            SLOTS,
            tuple(
                KVSource(self.pools[layer][i], half, layer, row, row, dtype=torch.bfloat16)
                for layer in range(LAYERS)
                for i, half in enumerate("kv")
            ),
            null_slot=0,
        )

    def batch(self) -> BatchView:
        return BatchView(
            self.prefix_lens, self.new_lens, self.token_ids, self.writers,
            {"full": SlotTable(self.table, self.table_rows, write_slots=self.write_slots)},
            positions=self.positions, expected_tokens=self.expected,
        )  # fmt: skip

    def forward(self) -> None:
        """May be captured."""
        hidden = self.embedding[self.token_ids] + self.place[self.positions]  # [tokens, channels]
        slots = self.table[self.table_rows[self.token_rows]].long().clamp(0, SLOTS - 1)  # [tokens, width]
        readable = self.columns <= self.positions[:, None]
        for layer in range(LAYERS):
            for half in range(2):
                pool = self.pools[layer][half]
                new = torch.where(self.nan[layer, half], float("nan"), hidden @ self.weights[layer, half])
                new = torch.where(self.lost[layer, half], pool[self.write_slots], new)
                pool.index_copy_(0, self.write_slots, new)
            keys, values = (pool[slots].float() for pool in self.pools[layer])  # [tokens, width, channels]
            score = (hidden[:, None].float() * keys).sum(2) / CHANNELS**0.5
            weight = torch.softmax(score.masked_fill(~readable, float("-inf")), 1)
            # What isn't read must not matter: 0 * NaN would.
            read = (weight[:, :, None] * values.masked_fill(~readable[:, :, None], 0)).sum(1)
            hidden = hidden + read.to(torch.bfloat16)
        self.output.copy_(hidden)
        for layer in range(LAYERS):
            for half in range(2):
                bits = self.pools[layer][half].view(torch.int16)
                bits.index_copy_(0, self.stray_slot, bits[self.stray_slot] ^ self.stray_mask[layer, half])


class Run:
    """An engine under guard and everything that was reported.

    ``graph``: the bracket is captured and replayed. ``warm`` False: without an eager run before the capture, so that
    Canary's scratch grows inside it. ``guard`` False: the same engine without Canary. ``audit`` True lets every wait
    for the device within our calls raise, and adds to ``allocated`` what they allocate there. ``beside``: checks run
    beside the forward and are issued after it, and records are made beside what follows it. ``settings``: more of
    Canary's. Verdicts are in ``verdicts``.
    """

    def __init__(
        self,
        device: str,
        graph: bool = False,
        beside: bool = False,
        size: Size | None = None,
        warm: bool = True,
        guard: bool = True,
        **settings: object,
    ) -> None:
        self.beside = beside
        self.settings = settings
        self.verdicts: list[Verdict] = []
        self.size = size or Size()
        self.device = device
        self.model, self.traffic, self.writers = Model(self.size, device), Traffic(self.size, seed=3), Writers()
        self.view = self.model.batch()
        self.findings = Findings()
        self.audit, self.allocated = False, 0
        self.recorded = self.checked = 0
        self.canary = self._attach() if guard else None
        self.graph = self._capture(warm) if graph else None

    @property
    def violations(self) -> list[Violation]:
        """What was reported so far."""
        return self.findings.violations

    def clean(self, steps: int) -> None:
        """Steps in which nothing may be found."""
        before = len(self.violations)
        for _ in range(steps):
            step = self.traffic.next()
            self.stage(step)
            self.issue()
            self.traffic.commit(step)
        assert [str(v) for v in self.found()[before:]] == []

    def stage(self, step: Step) -> None:
        """Fills the static buffers."""
        if self.canary is not None:
            self.canary.step.join()
        live, m = step.live, self.model
        requests = step.rows
        fill(m.prefix_lens, [r.cached if r else 0 for r in requests])
        fill(m.new_lens, step.new)
        fill(m.writers, [self.writers.id(r.name) if r else -1 for r in requests])
        fill(m.table_rows, [r.table_row if r else 0 for r in requests])
        fill(m.expected, [(r.tokens if r else []) + [-1] * (WIDTH - len(r.tokens if r else [])) for r in requests])
        table = [[0] * WIDTH for _ in range(m.table.shape[0])]
        for r in filter(None, requests):
            table[r.table_row][: len(r.slots)] = r.slots
        fill(m.table, table)
        spare = [0] * (self.size.tokens - len(live))
        fill(m.token_ids, [r.tokens[p] for r, p in live] + spare)
        fill(m.positions, [p for _, p in live] + spare)
        fill(m.token_rows, [requests.index(r) for r, _ in live] + spare)
        fill(m.write_slots, [r.slots[p] for r, p in live] + spare)
        self.recorded += len(live)
        self.checked += sum(r.cached for r in requests if r)

    def issue(self, eager: bool = False) -> None:
        """One forward within its bracket: replayed, or eagerly, then the end of the step."""
        if self.canary is None:
            self.model.forward()
        elif self.graph is None or eager:
            overlap = Overlap.ALL if self.beside else Overlap.NONE
            self.ours(lambda: self.canary.step.run(self._forward, lambda: self.view, overlap=overlap))
        else:
            self.ours(self.graph.replay)
            self.ours(self.canary.step.end)

    def found(self) -> list[Violation]:
        """All findings so far; waits for the device."""
        assert self.canary is not None
        self.canary.drain()
        assert self.canary.enabled, [e.fields for e in self.findings.told("disabled")]
        return list(self.violations)

    def bracket(self) -> None:
        """What is captured."""
        if self.canary is not None:
            self.canary.step.before(self.view)
        self.model.forward()
        if self.canary is not None:
            self.canary.step.after(self.view)

    def _attach(self) -> Canary:
        # The scrub goes round the whole pool in every forward, so that every changed byte is found in the same one.
        # What is looked at after an incident is allocated, once for each; tests/gpu/test_incidents.py is about that.
        settings = dict(mode="log", scrub_budget="1MiB", silence_s=0, stats_interval=0, diagnose=False)
        config = CanaryConfig(**(settings | self.settings))
        hooks = private_hooks(self.findings, self)
        return Canary([self.model.region()], config, hooks=hooks, writers=self.writers)

    @hookimpl
    def canary_verdict(self, verdict: Verdict) -> None:
        """Keeps it."""
        self.verdicts.append(verdict)

    def _capture(self, warm: bool) -> torch.cuda.CUDAGraph:
        # Padding only, so that nothing is written.
        self.stage(Step([None] * self.size.rows, [0] * self.size.rows))
        torch.cuda.synchronize()
        if warm:
            warm_up(self.bracket)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.bracket()
        return graph

    def ours(self, call):
        """A call of Canary; with ``audit`` it may not wait, and what it allocates is counted."""
        if not self.audit:
            return call()
        before = allocations()
        with no_waiting():
            given = call()
        self.allocated += allocations() - before
        return given

    def _forward(self):
        """The engine's own forward, which may do what it likes."""
        if not self.audit:
            self.model.forward()
            return
        before = allocations()
        torch.cuda.set_sync_debug_mode("default")
        self.model.forward()
        torch.cuda.set_sync_debug_mode("error")
        self.allocated -= allocations() - before


def warm_up(bracket) -> None:
    """Runs ``bracket`` a few times on a stream of its own, as captures want it: kernels and libraries get loaded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            bracket()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def fill(tensor: torch.Tensor, values: list) -> None:
    """New values for a static buffer."""
    tensor.copy_(torch.tensor(values, dtype=tensor.dtype))


def allocations() -> int:
    """How often torch's allocator has handed out device memory."""
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


@contextmanager
def no_waiting():
    """Every wait for the device that torch knows of raises."""
    try:
        with warnings.catch_warnings():
            # Once in a process torch warns that it does not know of all.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
