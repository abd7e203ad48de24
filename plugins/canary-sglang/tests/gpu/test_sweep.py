"""Sweeps and window reports on a GPU: records gathered on the forwards' stream, judged when they arrive.

``python3 -m pytest -m gpu plugins/canary-sglang/tests/gpu/test_sweep.py``: two engines, up to a minute each.
"""

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

COMMON = {"prompts": 12, "new_tokens": 32, "shared": 300, "patience_s": 280}
SETUPS = {"llama": ("gpu_llama", ("full",)), "swa": ("gpu_cohere2", ("full", "swa"))}
SETTINGS = {"CANARY_SWEEP_INTERVAL": "1", "CANARY_DIVERGENCE_INTERVAL": "10", "CANARY_LOG_LEVEL": "warning"}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(f"gpu_sweep_{name}")) for name in SETUPS]
)
def engine(request, launch):
    """An engine with CUDA graphs that is swept all the time."""
    model, regions = SETUPS[request.param]
    process = launch({**COMMON, "regions": regions, "options": {"device": "cuda", "model": model}}, **SETTINGS)
    yield process
    process.close()


def test_clean_caches_raise_nothing(engine, record_property):
    """Prefix hits, chunked prefills and graphs, a sweep whenever the last one is done: no finding."""
    traffic = engine.setup
    steps = sum(
        engine.serve(prompts=traffic.traffic(seed), new_tokens=traffic.new_tokens)["steps"] for seed in (0, 0, 1)
    )
    done = engine.sweep()
    told = engine.findings()
    sweeps = [event for event in engine.events() if event["name"] == "sweep"]
    record_property("sweeps", len(sweeps))
    record_property("steps", steps)
    record_property("nodes", done["nodes"])
    assert told["violations"] == []
    assert {(event["findings"], event["unknown_slots"]) for event in sweeps} == {(0, 0)}
    assert len(sweeps) > steps / 10
    assert done["tokens"] > traffic.shared
    reports = [event for event in engine.events() if event["name"] == "window_divergence"]
    assert bool(reports) == ("swa" in traffic.regions)
    assert all(event["evicted_inside"] == 0 for event in reports)


@pytest.mark.parametrize("how", ["swap", "token", "free", "lock"])
def test_a_corrupted_node_is_named(engine, how):
    """Found at its node, in a cache whose slots are on the device."""
    engine.serve(prompts=engine.setup.traffic(3, 6), new_tokens=2)
    done = engine.break_cache(how=how)
    found = [v for v in done["violations"] if v["phase"] == "sweep"]
    assert found
    assert {v.get("node") for v in found} <= {done["node"], None}
    assert engine.sweep()["findings"] == 0
