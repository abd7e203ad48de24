"""A host tier that the engine does not have, added from outside: what it brings back is judged by the ledger."""

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from canary_toy.hooks import ToyHooks
from canary_toy.pool import REGION
from canary_toy.toy_engine import LAYERS, PAGE, Engine, Request
from torch import Tensor

from canary_core import Arrival, Canary, CanaryConfig, Kind, Origin, Patches

Tokens = tuple[int, ...]


class HostTier:
    """Stores pages when the prefix cache takes them in, by all tokens up to their end, and brings back those that the
    cache has evicted since, before a request starts. ``fault(tokens, layer, kv)`` gives other bytes of a page."""

    def __init__(self, engine: Engine, canary: Canary) -> None:
        self.engine, self.canary = engine, canary
        self.stored: dict[Tokens, list[Tensor]] = {}
        self.loads = 0
        self.fault: Callable[[Tokens, int, Tensor], Tensor] | None = None
        self._patches = Patches()
        self._patches.follow(engine.cache, "insert", lambda _, tokens, pages, *salt: self._store(tokens, pages))
        self._patches.wrap(engine, "_admit", self._loads_first)

    def _store(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        ends = range(PAGE, len(tokens) + 1, PAGE)
        for end, page in zip(ends, pages, strict=False):
            self.stored.setdefault(tuple(tokens[:end]), [kv[:, page].clone() for kv in self.engine.pool.layers])
        self.canary.ledger.keep_pages(REGION, torch.tensor(pages[: len(ends)]), PAGE)

    def _loads_first(self, admit: Callable[[Request], None]) -> Callable[[Request], None]:
        def admit_after(request: Request) -> None:
            self._load(request.tokens[:-1])
            admit(request)

        return admit_after

    def _load(self, tokens: Sequence[int]) -> None:
        engine = self.engine
        cached = engine.cache.match(tokens)
        known = end = len(cached)
        while tuple(tokens[: (end + 1) * PAGE]) in self.stored and (end + 1) * PAGE <= len(tokens):
            end += 1
        if end == known:
            return
        # So that making room does not evict what these pages go on from.
        engine.cache.take(cached)
        pages = engine._allocate(end - known) or []
        for number, page in zip(range(known, end), pages, strict=True):
            prefix = tuple(tokens[: (number + 1) * PAGE])
            for layer, (kv, data) in enumerate(zip(engine.pool.layers, self.stored[prefix], strict=True)):
                kv[:, page] = self.fault(prefix, layer, data.clone()) if self.fault else data
        end = known + len(pages)
        slots = (torch.tensor(pages, dtype=torch.int64)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        self.canary.ledger.arrive(Arrival(REGION, slots, tokens[: end * PAGE], Origin("host tier"), PAGE))
        engine.cache.insert(tokens[: end * PAGE], [*cached, *pages])
        engine.release([*cached, *pages])
        self.loads += len(pages)


@pytest.fixture
def tier() -> Iterator[HostTier]:
    """A guarded engine of few pages with a host tier."""
    hooks = ToyHooks()
    hooks.install(CanaryConfig.load(read_check=-1))
    engine = Engine(24)
    yield HostTier(engine, hooks.guards[-1].canary)
    hooks.uninstall()


PROMPTS = [[(7 * i + j * j) % 250 + 1 for j in range(30)] for i in range(6)]


def serve(tier: HostTier, prompts: Sequence[Sequence[int]], name: str) -> list[list[int]]:
    """Answers to ``prompts``, one after the other, so that each one's pages push out another's."""
    answers = []
    for i, prompt in enumerate(prompts):
        request = tier.engine.submit(f"{name}-{i}", prompt, 4)
        while tier.engine.step():
            pass
        answers.append(request.answer)
    return answers


def test_hundreds_of_pages_come_back_in_silence(findings, tier):
    """Each is compared with what was stored under its prefix, and the answers stay what they were."""
    first = serve(tier, PROMPTS, "first")
    draw = random.Random(1)
    for turn in range(10):
        order = draw.sample(range(len(PROMPTS)), len(PROMPTS))
        assert serve(tier, [PROMPTS[i] for i in order], f"t{turn}") == [first[i] for i in order]
    tier.canary.drain()
    assert findings.violations == []
    assert [e.name for e in findings.events if e.level in ("warning", "error")] == []
    assert tier.loads > 200
    assert tier.canary.stats()["ledger_matched"] == tier.loads


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(("half", "index"), [("k", 0), ("v", 1)])
def test_a_flip_in_host_memory_is_found_where_it_is(findings, tier, layer, half, index):
    """With layer, half, the positions of the page, and the tier's name."""
    serve(tier, PROMPTS, "first")
    wrong = tuple(PROMPTS[0][: 2 * PAGE])
    tier.stored[wrong][layer][index].view(torch.int32)[1, 0, 0] ^= 1 << 12
    serve(tier, PROMPTS[:1], "again")
    tier.canary.drain()
    assert [(v.kind, v.layer, v.half, v.position, v.origin) for v in findings.violations] == [
        (Kind.ARRIVAL, layer, half, PAGE, "host tier")
    ]


def test_a_half_that_is_not_copied_is_named(findings, tier):
    """Values left out on every layer: all of these sources, and no others."""
    serve(tier, PROMPTS, "first")
    tier.fault = lambda tokens, layer, kv: torch.stack((kv[0], torch.zeros_like(kv[1])))
    serve(tier, PROMPTS[:1], "again")
    tier.canary.drain()
    arrivals = [v for v in findings.violations if v.kind is Kind.ARRIVAL]
    assert len(arrivals) > 3
    assert {v.sources for v in arrivals} == {("v.0", "v.1")}
