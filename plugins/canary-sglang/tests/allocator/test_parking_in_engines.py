"""Which slots real engines have parked: those that the locks of their own prefix caches say, after traffic of all
sorts; and where that is not followed, an event says why."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
from packaging.version import Version

pytestmark = pytest.mark.timeout(900)

UNIFIED = find_spec("sglang") is not None and Version("0.5.19") <= Version(version("sglang"))
"""Whether this release has a `UnifiedRadixCache` unless it is told otherwise."""
NAMESPACES = [None, "adapter", "other"]
"""As LoRA adapters have them, which SGLang adds to a request's key in the same way."""
PYTHON = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
BESIDE = pytest.mark.takes_turns("test_parking, without an engine")
COVERED = pytest.mark.beyond_ci("a small pool, with chunks, eviction and retraction")
FOLLOWED = [
    "pressure",
    *(pytest.param(name, marks=COVERED) for name in ("mha", "pages", "fp8", "mla", "mixed", "python")),
]
NOT_FOLLOWED = {"swa": "FULL, SWA", "hicache": "host memory", "mamba2": "FULL, MAMBA", "eagle": "speculative decoding"}


@BESIDE
@pytest.mark.parametrize("name", FOLLOWED)
def test_an_engine_parks_what_its_cache_does_not_lock(launch, name):
    """Traffic with prefix hits in three namespaces, chunks, and, in a small pool, eviction and retraction; random
    traffic with aborts and flushes: what is parked is what the cache's own walk or nodes say, nothing is found, and no
    event says that it is not followed."""
    engine = launch({"environment": PYTHON}, like="pressure") if name == "python" else launch({}, like=name)
    setup = engine.setup
    hit = 0
    for seed in (30, 31, 30):
        served = engine.serve(
            prompts=setup.traffic(seed), new_tokens=setup.new_tokens, namespaces=NAMESPACES if seed == 30 else [None]
        )
        hit += sum(served["cached"])
        told = engine.parked()
        assert told["differences"] == []
        assert told["both"] > 0
    assert hit > 0
    engine.storm(seed=9, steps=min(200, setup.storm_steps), prefix=setup.storm_prefix, new_tokens=12)
    told = engine.parked()
    assert (told["differences"], told["off"]) == ([], [])
    assert engine.flush()
    assert engine.parked() == {"both": 0, "differences": [], "off": []}
    assert engine.findings()["violations"] == []


@COVERED
def test_the_overlap_scheduler_parks_alike(launch):
    """SGLang's own event loop, which lets go of what a forward in flight still reads, in a small pool."""
    engine = launch({"options": {"disable_overlap_schedule": False}}, like="pressure")
    engine.storm_overlapped(seed=9, turns=400, new_tokens=24)
    told = engine.parked()
    assert (told["differences"], told["off"]) == ([], [])
    assert told["both"] > 0
    assert engine.findings()["violations"] == []


@BESIDE
@pytest.mark.parametrize(
    "name", ["swa", *(pytest.param(name, marks=COVERED) for name in ("hicache", "mamba2", "eagle", "radix_off"))]
)
def test_an_engine_whose_cache_is_not_followed_says_so(start, name):
    """Once, with the cache's class and the reason; not where no cache keeps anything."""
    engine = start(name)
    engine.serve(prompts=engine.setup.traffic(3, 4), new_tokens=2)
    events = [event for event in engine.events() if event["name"] == "parking_off"]
    if name == "radix_off":
        assert events == []
        return
    (event,) = events
    assert event["level"] == "info"
    if UNIFIED or name in ("hicache", "eagle"):
        assert NOT_FOLLOWED[name] in event["reason"]
    assert set(event["regions"]) <= set(engine.setup.regions)
    assert event["cache"].endswith("Cache")
    assert engine.findings()["violations"] == []
