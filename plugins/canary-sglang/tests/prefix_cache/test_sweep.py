"""Sweeps of real SGLang prefix caches: clean ones raise nothing, whatever is broken in one is found at its node."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

pytestmark = pytest.mark.timeout(900)

PYTHON_CORE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}


@dataclass(frozen=True)
class Cache:
    """A prefix cache in one of the engine's setups, and the releases that have it."""

    setup: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    since: str = "0"
    before: str = "9"
    flat: bool = False
    """Its core gives neither nodes nor tokens nor locks."""


UNIFIED = {"SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1"}
RUST = "0.5.21"
CACHES = {
    "radix": Cache("mha", before=RUST),
    "radix_pages": Cache("pages", before=RUST),
    "radix_pressure": Cache("pressure", before=RUST),
    "radix_mixed": Cache("mixed", before=RUST),
    "swa_radix": Cache("swa", {"radix_cache_backend": "swa_radix_cache_of_tests"}, before=RUST),
    "hiradix": Cache("hicache", before=RUST),
    "unified": Cache("mha", environment={**UNIFIED, **PYTHON_CORE}, since="0.5.16"),
    "unified_pages": Cache("pages", environment=PYTHON_CORE, since=RUST),
    "unified_swa": Cache("swa", environment=PYTHON_CORE, since="0.5.16"),
    "unified_pressure": Cache("pressure", environment=PYTHON_CORE, since=RUST),
    "unified_mixed": Cache("mixed", environment=PYTHON_CORE, since=RUST),
    "unified_hicache": Cache("hicache", environment={**UNIFIED, **PYTHON_CORE}, since="0.5.16"),
    "unified_deepseek_v4": Cache("deepseek_v4", environment=PYTHON_CORE, since=RUST),
    "rust": Cache("mha", since=RUST, flat=True),
    "rust_pages": Cache("pages", since=RUST, flat=True),
    "rust_swa": Cache("swa", since=RUST, flat=True),
    "rust_pressure": Cache("pressure", since=RUST, flat=True),
    "rust_hicache": Cache("hicache", since=RUST, flat=True),
    "rust_deepseek_v4": Cache("deepseek_v4", since=RUST, flat=True),
}
IN_CI = "unified_swa"
beyond_ci = pytest.mark.beyond_ci(f"{IN_CI}, which has nodes of every sort, and walks without an engine")


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Tests of one cache go to the same worker."""
    return [pytest.mark.xdist_group(name), *([] if name == IN_CI else [beyond_ci])]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name)) for name in CACHES])
def swept(request: pytest.FixtureRequest, launch: Callable[..., Any]) -> Iterator[Any]:
    """An engine whose cache is swept at every step."""
    cache = CACHES[request.param]
    installed = Version(version("sglang"))
    if not Version(cache.since) <= installed < Version(cache.before):
        pytest.skip(f"SGLang {installed} has no such cache")
    # Room for what other processes take while the engine measures how much memory there is.
    options = {"mem_fraction_static": 0.3, **cache.options}
    # Nothing here depends on what the model computes, so it need not be compiled.
    fields = {"options": options, "environment": {"TORCHDYNAMO_DISABLE": "1", **cache.environment}}
    process = launch(
        fields, like=cache.setup, CANARY_SWEEP_INTERVAL="1", CANARY_BYTES="off", CANARY_LOG_LEVEL="warning"
    )
    process.cache = cache
    yield process
    process.close()


def sweeps(engine: Any) -> list[dict[str, Any]]:
    """What the sweeps told so far."""
    return [event for event in engine.events() if event["name"] == "sweep"]


def test_clean_caches_raise_nothing(swept):
    """Prefix hits, chunked prefills, evictions and retractions, a sweep at every step: no finding, and each sweep says
    what it looked at, once its results were in."""
    setup = swept.setup
    steps = sum(swept.serve(prompts=setup.traffic(seed), new_tokens=setup.new_tokens)["steps"] for seed in (0, 0, 1))
    told = swept.findings()
    assert told["violations"] == []
    done = sweeps(swept)
    assert {event["findings"] for event in done} == {0}
    assert {event["unknown_slots"] for event in done} == {0}
    assert len(done) > steps / 2
    assert max(event["nodes"] for event in done) > 3
    assert max(event["tokens"] for event in done) > setup.shared
    assert any(event["sizes_checked"] for event in done)
    assert told["stats"]["sweeps"] == len(done)
    assert told["stats"]["swept_slots"] == sum(event["slots"] for event in done) > 0
    assert {"disabled", "sweep_unavailable"}.isdisjoint(event["name"] for event in swept.events())


@pytest.mark.parametrize("which", ["any", "locked", "passed"])
@pytest.mark.parametrize("how", ["swap", "token", "free"])
def test_a_corrupted_node_is_named(swept, how, which):
    """Two slots of a node exchanged, a slot that was written for another token, slots that the allocator has too: found
    at the node, with the slot; in nodes that a running request holds, and in those whose window has passed."""
    if swept.cache.flat and which != "any":
        pytest.skip("this core does not say which nodes are which")
    if which == "passed" and swept.cache.setup != "swa":
        pytest.skip("no node of this traffic is without its window")
    setup = swept.setup
    swept.serve(prompts=setup.traffic(3, 4), new_tokens=2)
    done = swept.break_cache(how=how, which=which)
    node = None if swept.cache.flat else done["node"]
    found = [v for v in done["violations"] if v["phase"] == "sweep"]
    assert {v.get("node") for v in found} == {node}
    assert done["sweep"]["findings"] >= len(found) > 0
    if how == "swap":
        assert {"position"} <= {v["kind"] for v in found} <= {"position", "prefix"}
    elif how == "token":
        wanted = {(region, slot) for region, slot in done["changed"]}
        assert {(v["region"], v["slot"]) for v in found} == wanted
        assert {v["kind"] for v in found} <= {"token", "prefix"}
    else:
        assert {v["rule"] for v in found} == {"slot_free"}
        assert {v["slot"] for v in found} == set(done["slots"])
    assert swept.sweep()["findings"] == 0
    assert swept.findings()["violations"] == []


@pytest.mark.parametrize(
    ("how", "rules"),
    [("lock", {"lock_ref"}), ("key", {"key"}), ("parent", {"parent"}), ("sizes", {"sizes"}), ("twice", {"slot_twice"})],
)
def test_a_broken_structure_is_named(swept, how, rules):
    """A lock count below zero, a node under a wrong key or with a wrong parent, a cache that counts wrongly, a slot in
    two nodes: each is told as what it is."""
    if swept.cache.flat:
        pytest.skip("nothing of this core can be broken from outside")
    setup = swept.setup
    swept.serve(prompts=setup.traffic(4, 4), new_tokens=2)
    done = swept.break_cache(how=how)
    found = [v for v in done["violations"] if v["kind"] == "cache_structure" and v["rule"] in rules]
    nodes = {v.get("node") for v in found}
    assert nodes == ({None} if how == "sizes" else nodes & {done["node"], done.get("other")})
    assert nodes
    assert swept.sweep()["findings"] == 0


@pytest.mark.parametrize(("how", "rule"), [("host_swap", "host"), ("host_free", "host"), ("dead", "tier")])
def test_nodes_in_host_memory_are_checked(swept, how, rule):
    """Of nodes that the device no longer has, the sweep compares the host slots with the records that went there: two
    that are exchanged, and one that the host pool could hand out, are found at the node; so is a node that is
    nowhere."""
    if swept.cache.setup != "hicache" or swept.cache.flat:
        pytest.skip("no host memory, or no nodes")
    for seed in (7, 8, 9):
        swept.serve(prompts=swept.setup.traffic(seed), new_tokens=2)
    before = swept.sweep()
    assert before["on_host"] > 0
    assert before["host_slots"] > before["slots"]
    done = swept.break_cache(how=how, which="host_runs")
    assert {(v["kind"], v["rule"], v["node"]) for v in done["violations"]} == {("cache_structure", rule, done["node"])}
    assert swept.sweep()["findings"] == 0


def test_nodes_that_are_about_to_be_loaded_are_not_judged(swept):
    """From when a node has been given slots to when its KV is loaded to them, nothing is known of these."""
    if swept.cache.setup != "hicache" or swept.cache.flat:
        pytest.skip("nothing is loaded, or no nodes")
    for seed in (7, 8, 9):
        swept.serve(prompts=swept.setup.traffic(seed), new_tokens=2)
    done = swept.break_cache(how="queued", which="host_runs")
    assert done["violations"] == []
    assert done["sweep"]["unknown_slots"] == len(done["slots"]) > 1
    assert swept.sweep()["unknown_slots"] == 0


@pytest.mark.parametrize(("how", "which"), [("unmap", "any"), ("remap", "passed")])
def test_the_window_map_is_checked(swept, how, which):
    """A node that should have its window's slots and has none, and one whose window has passed and that has some."""
    if swept.cache.setup != "swa" or swept.cache.flat:
        pytest.skip("no window, or no nodes")
    setup = swept.setup
    swept.serve(prompts=setup.traffic(5, 4), new_tokens=2)
    done = swept.break_cache(how=how, which=which)
    found = done["violations"]
    assert {(v["kind"], v["region"]) for v in found} == {("null_slot" if how == "unmap" else "cache_structure", "swa")}
    assert {v["node"] for v in found} == {done["node"]}
    assert swept.sweep()["findings"] == 0


def test_a_flush_in_between_is_no_finding(swept):
    """A cache that is emptied while it is swept."""
    setup = swept.setup
    swept.serve(prompts=setup.traffic(6, 4), new_tokens=2)
    assert swept.flush()
    swept.serve(prompts=setup.traffic(6, 4), new_tokens=2)
    assert swept.findings()["violations"] == []


@beyond_ci
def test_no_cache_is_told_once(start):
    """With the radix cache off there is nothing to sweep, which one event says."""
    engine = start("radix_off", CANARY_SWEEP_INTERVAL="1")
    engine.serve(prompts=engine.setup.traffic(0, 4), new_tokens=2)
    assert [event["level"] for event in engine.events() if event["name"] == "sweep_unavailable"] == ["info"]
    assert engine.findings()["violations"] == []
