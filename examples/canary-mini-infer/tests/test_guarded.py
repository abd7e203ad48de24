"""Traffic under guard: silent as long as nothing is wrong; the engine's own bug, and bits that flip, are named."""

import os
import random
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("mini_infer", reason="mini-infer is not installed, or this Python is older than 3.11")

from canary_mini_infer.hooks import MiniHooks
from canary_mini_infer.session import PAGE, small_engine
from mini_infer import InferenceEngine

from canary_core import CanaryConfig, Kind, hook_manager
from canary_core.testing import Findings

SEEDS = range(int(os.environ.get("SOAK_SEEDS", "1")))
"""One in CI."""
SHARED = list(range(1, 2 * PAGE + 1))
KINDS = {
    "whole prompts": {},
    "int8 in chunks": {"kv_cache_dtype": "int8", "chunked_prefill_size": 11},
    "mended prefix cache": {"mended": True, "chunked_prefill_size": 9},
}
REQUESTS = 12


@pytest.fixture
def findings() -> Iterator[Findings]:
    """What is told while a test runs."""
    collector = Findings()
    hook_manager().register(collector)
    yield collector
    hook_manager().unregister(collector)


@pytest.fixture
def hooks() -> Iterator[MiniHooks]:
    """Engines that a test makes are guarded; every byte that a forward reads is compared."""
    hooks = MiniHooks()
    hooks.install(CanaryConfig.load(read_check=-1))
    yield hooks
    hooks.uninstall()


def traffic(engine: InferenceEngine, seed: int) -> list[list[int]]:
    """Requests that come at any time, in a pool so small that decodes are preempted; most begin alike, and the prefix
    cache is emptied where the next ones would not fit."""
    draw = random.Random(seed)
    pool, scheduler, requests = engine.block_pool, engine.scheduler, []
    for _ in range(400):
        if len(requests) < REQUESTS and draw.random() < 0.5:
            own = [draw.randrange(1, 128) for _ in range(draw.randrange(1, 14))]
            prompt = [*SHARED[: draw.randrange(19)], *own]
            requests.append(
                engine.add_request(prompt, max_tokens=draw.randrange(1, 30), request_id=f"r{len(requests)}")
            )
        if engine.prefix_cache is not None and pool.num_free < 8:
            engine.prefix_cache.evict_lru(pool, 64)
        if not scheduler.has_unfinished_sequences() and len(requests) == REQUESTS:
            return [request.output_token_ids for request in requests]
        engine.step()
        # One at least, whatever is drawn.
        if scheduler.running and (
            draw.random() < 0.03 or (len(requests) == REQUESTS and not scheduler.preempted_count)
        ):
            request = draw.choice(scheduler.running)
            if request.status.name == "RUNNING":
                scheduler.preempt(request)
    raise AssertionError("requests are not answered")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_soak(findings, hooks, kind, seed):
    """Nothing is found, much was checked, requests were preempted, and the answers are those of an engine that nobody
    guards. ``SOAK_SEEDS=100`` serves so many times as much."""
    settings = {"blocks": 12, "max_batch_size": 4, **KINDS[kind]}
    engine = small_engine(**settings)
    answers = traffic(engine, seed)
    canary = hooks.guards[-1].canary
    canary.drain()
    assert findings.violations == []
    assert [e.name for e in findings.events if e.level in ("warning", "error")] == []
    assert canary.stats()["checked_slots"] > 300
    assert engine.scheduler.preempted_count
    hooks.uninstall()
    assert answers == traffic(small_engine(**settings), seed)


def served(engine: InferenceEngine) -> list[list[int]]:
    """Bob begins as Alice does, while she is answered."""
    alice = engine.add_request([*SHARED, 50, 51], max_tokens=20, request_id="alice")
    for _ in range(4):
        engine.step()
    bob = engine.add_request([*SHARED, 60, 61, 62], max_tokens=6, request_id="bob")
    while engine.scheduler.has_unfinished_sequences():
        engine.step()
    return [alice.output_token_ids, bob.output_token_ids]


def test_the_prefix_cache_of_the_unmodified_engine_is_found_to_be_wrong(findings, hooks):
    """mini-infer 0.2.5 with its default, prefix caching: a prompt that hits is computed as if it began behind the hit,
    and its KV is stored over the beginning, which others read. Both are told in that forward, before anybody has read
    it, and that both answers are wrong shows by an engine without the cache."""
    right = served(small_engine())
    assert served(small_engine(enable_prefix_caching=True)) != right
    assert served(small_engine(mended=True)) == right
    first, *_, last = findings.violations
    told = {(v.kind, v.request) for v in findings.violations}
    assert {(Kind.WRITE_INPUT, "bob"), (Kind.WRITE_SLOT, "bob"), (Kind.POSITION, "alice")} <= told
    assert (first.kind, first.request, first.position) == (Kind.WRITE_INPUT, "bob", len(SHARED))
    assert last.request in ("alice", "bob")


@pytest.mark.parametrize("what", ["key_caches", "value_caches", "key_scales", "value_scales"])
def test_a_flipped_bit_of_int8_is_found_where_it_is(findings, hooks, what):
    """Scales are guarded as their data is."""
    engine = small_engine(kv_cache_dtype="int8")
    request = engine.add_request(SHARED, max_tokens=8, request_id="a")
    engine.step()
    tensor = getattr(engine.block_pool, what)[1]
    tensor.view(torch.int8)[request.block_table.physical_block_ids[1], 1, 3, 0] ^= 1 << 4
    engine.step()
    hooks.guards[-1].canary.drain()
    (found,) = findings.violations
    half = what[0] + "_scale" * what.endswith("scales")
    assert (found.kind, found.layer, found.half, found.position) == (Kind.BYTES, 1, half, PAGE + 3)


def test_hooks_are_installed_once_and_leave_nothing_behind(hooks):
    """A second `install` changes nothing; after `uninstall` the engine's functions are its own."""
    patched = vars(InferenceEngine)["__init__"]
    hooks.install(CanaryConfig.load())
    assert vars(InferenceEngine)["__init__"] is patched
    engine = small_engine()
    hooks.uninstall()
    assert vars(InferenceEngine)["__init__"] is not patched
    assert "forward" not in vars(engine.model)
    hooks.uninstall()
