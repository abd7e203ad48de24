"""Traffic under guard: silent as long as nothing is wrong, and what is wrong is named."""

import random
from collections.abc import Iterator

import pytest
import torch
from canary_toy.hooks import ToyHooks
from canary_toy.toy_engine import LAYERS, PAGE, Engine

from canary_core import Canary, CanaryConfig, Kind, hook_manager
from canary_core.testing import Findings


@pytest.fixture
def findings() -> Iterator[Findings]:
    """What is told while a test runs."""
    collector = Findings()
    hook_manager().register(collector)
    yield collector
    hook_manager().unregister(collector)


@pytest.fixture
def hooks() -> Iterator[ToyHooks]:
    """Engines that a test makes are guarded; every byte that a forward reads is compared."""
    hooks = ToyHooks()
    hooks.install(CanaryConfig.load(read_check=-1))
    yield hooks
    hooks.uninstall()


def traffic(engine: Engine, seed: int, pages_change_hands: bool = True) -> list[list[int]]:
    """Requests of which most begin alike; in between some are preempted, forked, rolled back or aborted."""
    draw = random.Random(seed)
    begin = [draw.randrange(1, 256) for _ in range(22)]
    for i in range(24):
        own = [draw.randrange(1, 256) for _ in range(draw.randrange(1, 20))]
        engine.submit(f"r{i}", [*begin[: draw.randrange(22)], *own], draw.randrange(2, 12))
    for step in range(10_000):
        if not engine.step():
            break
        if not engine.running or not pages_change_hands:
            continue
        request, chance = draw.choice(engine.running), draw.random()
        if chance < 0.1:
            engine.preempt(request)
        elif chance < 0.2 and engine.free_rows and len(engine.allocator.free_pages):
            engine.fork(request, f"{request.name}.{step}")
        elif chance < 0.35:
            engine.roll_back(request, draw.randrange(1, 5))
        elif chance < 0.37:
            engine.abort(request)
    return [request.answer for request in engine.requests.values()]


def guarded(hooks: ToyHooks) -> Canary:
    """The Canary of the engine that was made last."""
    return hooks.guards[-1].canary


@pytest.mark.parametrize("pages", [48, 20])
@pytest.mark.parametrize("seed", range(3))
def test_clean_traffic_is_silent(findings, hooks, pages, seed):
    """Hits, preemption, forks, roll backs, aborts and, in the small pool, eviction under pressure: nothing is found,
    much was checked, and the answers are those of an engine that nobody guards."""
    answers = traffic(Engine(pages), seed)
    canary = guarded(hooks)
    canary.drain()
    assert findings.violations == []
    assert [e.name for e in findings.events if e.level in ("warning", "error")] == []
    assert canary.stats()["checked_slots"] > 1000
    hooks.uninstall()
    assert answers == traffic(Engine(pages), seed)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(("half", "index"), [("k", 0), ("v", 1)])
def test_a_flipped_bit_is_found_where_it_is(findings, hooks, layer, half, index):
    """The finding names layer, half, position, and the request that wrote there."""
    engine = Engine()
    request = engine.submit("a", list(range(1, 30)), 8)
    while not request.answer:
        engine.step()
    engine.pool.layers[layer].view(torch.int32)[index, request.pages[2], 1, 0, 0] ^= 1 << 9
    engine.step()
    guarded(hooks).drain()
    (found,) = findings.violations
    assert (found.kind, found.layer, found.half, found.position) == (Kind.BYTES, layer, half, 2 * PAGE + 1)
    assert (found.request, found.stored_request) == ("a", "a")


def test_a_wrong_block_table_is_found(findings, hooks):
    """Two pages of a request in the wrong order."""
    engine = Engine()
    request = engine.submit("a", list(range(1, 30)), 8)
    while not request.answer:
        engine.step()
    request.pages[0], request.pages[1] = request.pages[1], request.pages[0]
    engine.step()
    guarded(hooks).drain()
    assert {v.kind for v in findings.violations} == {Kind.POSITION}


def test_a_page_that_is_freed_too_early_is_found(findings, hooks):
    """Another request is given a page that the first one still reads."""
    engine = Engine()
    request = engine.submit("a", list(range(1, 7)), 8)
    while not request.answer:
        engine.step()
    engine.allocator.free(request.pages[1:])
    engine.step()
    guarded(hooks).drain()
    assert findings.violations[0].kind is Kind.FREED


def test_hooks_are_installed_once_and_leave_nothing_behind(hooks):
    """A second `install` changes nothing; after `uninstall` the engine's functions are its own."""
    patched = vars(Engine)["__init__"]
    hooks.install(CanaryConfig.load())
    assert vars(Engine)["__init__"] is patched
    engine = Engine()
    hooks.uninstall()
    assert vars(Engine)["__init__"] is not patched
    assert "forward" not in vars(engine.runner)
    hooks.uninstall()
