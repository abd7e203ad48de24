"""What the plugin must do on every kind of engine: silent when all is well, exact when it is not."""

import random

import pytest
from vllm_on_cpu import guarded

from canary_core import Kind

pytestmark = pytest.mark.timeout(600)

ROUNDS = 3


def test_clean_traffic_is_silent_and_answers_stay_the_same(engine):
    """Prefix hits, chunked prefill, eviction, and in a crowded pool preemption: no finding, each byte that forwards
    change is claimed, all of the cache is guarded, and the answers are those without Canary."""
    engine.small.renew()
    plain = guarded.traffic(engine.small, ROUNDS)
    # With every byte read and scrubbed in each forward this would take minutes.
    with guarded.guard(engine.small, audit=16, read_check=128, scrub_budget="64KiB") as guard:
        answers = guarded.traffic(engine.small, ROUNDS)
        assert guard.trouble() == []
        stats, regions = guard.canary.stats(), guard.canary.regions
        (audit,) = guard.findings.told("audit")
        (coverage,) = guard.findings.told("coverage")
        assert guard.canary.sampled.followed
        assert guard.canary.sampled.left_out == 0
    assert answers == plain
    assert sorted(regions) == sorted(engine.setup.regions)
    assert audit.fields["unclaimed_bytes"] == 0
    assert coverage.fields["coverage_ratio"] == 1.0
    assert stats["forwards"] * len(regions) == stats["checked_forwards"] > 30
    assert min(stats[name] for name in ("checked_slots", "checked_bytes", "recorded_slots", "recorded_bytes")) > 1000


def test_flipped_bits_are_named(engine):
    """A bit that is flipped by vLLM's own tables in the KV of a running request is told with layer, half, position and
    request, and nothing else is."""
    draw = random.Random(5)
    with guarded.guard(engine.small) as guard:
        for number in range(engine.setup.layers * len(engine.setup.halves)):
            layer, half = number % engine.setup.layers, engine.setup.halves[number // engine.setup.layers]
            asked = guarded.prompts(f"flip {number}", 3)
            for i, prompt in enumerate(asked):
                engine.small.submit(f"{number}-{i}", prompt, 20)
            while any(len(engine.small.answers[f"{number}-{i}"]) < 3 for i in range(3)):
                engine.small.step()
            name = draw.choice([f"{number}-{i}" for i in range(3) if engine.small.running(f"{number}-{i}")])
            length = len(asked[int(name[-1])])
            position = draw.randrange(max(0, length + 4 - engine.setup.reach), length)
            before = len(guard.findings.violations)
            engine.small.poke(layer, half, name, position)
            while engine.small.step():
                pass
            guard.canary.drain()
            found = guard.findings.violations[before:]
            assert {(v.kind, v.layer, v.half, v.position) for v in found} == {(Kind.BYTES, layer, half, position)}
            assert found[0].stored_request.split("-")[0] == str(number)
            engine.small.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("fault", ["real_kv_used", "req_to_token", "lost_write", "next_token_swap", "swap_pages"])
def test_faults_are_found(engine, fault):
    """What `CANARY_FAULTS` injects is found."""
    injector = guarded.injector(fault)
    with guarded.guard(engine.small, injector) as guard:
        guarded.traffic(engine.small, 1, fault)
        guard.canary.drain()
        (injection,) = injector.injections
        assert any(injection.explains(v) for v in guard.findings.violations), guard.findings.violations
