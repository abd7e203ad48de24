"""Real SGLang on a CPU: clean traffic raises nothing and computes the same, every corruption is found as what it is."""

import pytest
from engines.setups import STATES_COVERED_BY, since
from tools.fault_injection import FAULTS

pytestmark = pytest.mark.timeout(900)

BEYOND_CI_WITH_DEEPSEEK_V4 = (
    "real_kv_unused_cache", "real_kv_post_forward", "lost_write", "stray_write", "swap_pages", "next_token_swap",
)  # fmt: skip
ON_EVERY_ENGINE_OF_AN_OLDER_RELEASE = ("swap_pages", "next_token_swap")
"""Enough to see that each engine starts there, too, and that what breaks in it is found."""

mamba2_beyond_ci = pytest.mark.where(pytest.mark.beyond_ci(STATES_COVERED_BY), engine="mamba2")

PAGE_SLOTS = {"pages": {"full": 4}, "deepseek_v4": {"swa": 256, "c4": 64, "c128": 2}}


def test_clean_traffic_raises_nothing(engine):
    """Mixed traffic with shared prefixes and chunked prefills, twice over, then other traffic: every forward is
    checked, nothing is found, nothing is left unjudged; what the scheduler says it computed is what was recorded."""
    setup = engine.setup
    steps = 0
    for seed in (0, 0, 1):
        steps += engine.serve(prompts=setup.traffic(seed), new_tokens=setup.new_tokens)["steps"]
    found = engine.findings()
    assert found["violations"] == []
    stats = found["stats"]
    assert stats["forwards"] == steps
    assert stats["checked_forwards"] == steps * len(setup.served)
    assert stats["checked_slots"] > 0
    assert stats["recorded_slots"] > 0
    assert stats["unknown_slots"] == 0
    assert stats["computed_tokens"] == stats["guarded_tokens"] > 0
    assert tuple(engine.regions()) == setup.regions


def test_the_first_forwards_change_nothing_but_what_their_views_name(engine):
    """Audited by SGLang's own tensors: prefills in chunks, prefix hits and decodes, with their padding."""
    if "audited_forwards" not in engine.findings()["stats"]:
        engine.serve(prompts=engine.setup.traffic(0), new_tokens=engine.setup.new_tokens)
    told = {event["name"]: event for event in engine.events()}
    assert told.keys().isdisjoint({"audit_failed", "audit_skipped", "pool_moved"}), told.get("audit_failed")
    stats = engine.findings()["stats"]
    assert stats["audited_forwards"] >= 8
    assert stats["audit_unclaimed_bytes"] == 0
    assert told["coverage"]["denominator"] == "engine"


@mamba2_beyond_ci
def test_coverage_is_told_at_start(engine):
    """The start-up events give what is guarded: of most pools every byte, else what is left out and why."""
    events = {event["name"]: event for event in engine.events()}
    coverage = events["coverage"]
    assert {item["name"].partition("/")[0] for item in coverage["uncovered"]} == engine.setup.left_out
    assert all(item["bytes"] and item["reason"] for item in coverage["uncovered"])
    assert (coverage["coverage_ratio"] == 1) == (not engine.setup.left_out)
    assert events["attached"]["mode"] == "log"
    assert "disabled" not in events


@mamba2_beyond_ci
def test_traffic_is_what_it_claims_to_be(engine, request):
    """The setups do what they are named after: prefixes are hit, requests retracted; DeepSeek-V4's compressors read
    rows of their rings, each of the token that they should."""
    setup = engine.setup
    served = engine.serve(prompts=setup.traffic(2), new_tokens=setup.new_tokens)
    assert engine.findings()["violations"] == []
    name = request.node.callspec.params["engine"]
    assert (sum(served["cached"]) > 0) == (name != "radix_off")
    assert (served["retracted"] > 0) == (name == "pressure")
    compressed = engine.compressed()
    assert (compressed["rows"] > 0) == (name == "deepseek_v4")
    assert compressed["misread"] == 0


def test_a_flipped_bit_is_found_in_every_source(engine):
    """One bit in any layer's K, V or latent, in any region: one finding, which names slot, layer and half."""
    engine.serve(prompts=engine.setup.traffic(3, 4), new_tokens=2)
    for region, about in engine.regions().items():
        for seed, source in enumerate(about["sources"]):
            slot = engine.flip_and_scrub(region=region, source=source, seed=seed)
            found = engine.findings()["violations"]
            half, layer = source.split(".")
            told = [(v["kind"], v["region"], v["slot"], v["layer"], v["half"]) for v in found]
            assert told == [("bytes", region, slot, int(layer), half)]
    engine.flush()


@mamba2_beyond_ci
@pytest.mark.where(
    pytest.mark.beyond_ci("two faults in each of its regions, and all faults of every other engine"),
    engine="deepseek_v4",
    fault=BEYOND_CI_WITH_DEEPSEEK_V4,
)
@pytest.mark.where(pytest.mark.older_release, fault=ON_EVERY_ENGINE_OF_AN_OLDER_RELEASE)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_as_what_it_is(engine, fault):
    """The faults of the core, injected through its own syntax into each region of the real engine. Bytes of a slot that
    is freed and written again before anybody looks are nobody's; then the fault is injected once more."""
    setup = engine.setup
    for region in setup.faulty(fault):
        for attempt in range(3):
            prompts = setup.traffic(4 + FAULTS.index(fault) + 10 * attempt, 6)
            text = f"{fault}:warmup=3,region={region}"
            done = engine.inject(text=text, prompts=prompts, new_tokens=setup.new_tokens)
            assert len(done["injections"]) == 1
            assert done["explained"] == [True] or done["rewritten"] == [True], done
            if done["explained"] == [True]:
                break
        assert done["explained"] == [True]


@mamba2_beyond_ci
def test_a_flush_leaves_nothing_behind(engine):
    """After ``flush_cache`` slots are reused by other requests without a finding."""
    setup = engine.setup
    engine.serve(prompts=setup.traffic(5, 4), new_tokens=setup.new_tokens)
    assert engine.flush()
    engine.serve(prompts=setup.traffic(6, 4), new_tokens=setup.new_tokens)
    assert engine.findings()["violations"] == []


@mamba2_beyond_ci
def test_canary_and_the_allocator_agree_on_every_slot(engine, request):
    """After traffic with chunks, prefix hits, eviction and retraction the slots that Canary holds to be free are those
    of the allocator's own list, in every region; after a flush, too."""
    setup = engine.setup
    regions = [name for name in setup.regions if name in ("full", "swa", "c4", "c128", "mamba")]
    for seed in (20, 21):
        engine.serve(prompts=setup.traffic(seed), new_tokens=setup.new_tokens)
        told = engine.ownership()
        assert {region: about["differences"] for region, about in told.items()} == {name: [] for name in regions}
    expected = PAGE_SLOTS.get(request.node.callspec.params["engine"], dict.fromkeys(regions, 1))
    assert {region: about["page_slots"] for region, about in told.items()} == expected
    assert engine.flush()
    assert all(about["differences"] == [] for about in engine.ownership().values())
    assert engine.findings()["violations"] == []
    assert "lifetime_off" not in {event["name"] for event in engine.events()}


@mamba2_beyond_ci
@pytest.mark.where(
    pytest.mark.beyond_ci("that of the window and the small pool"),
    engine=("mha", "pages", "mla", "fp8", "mixed", "radix_off", "deepseek_v4"),
)
@pytest.mark.long
@pytest.mark.last
def test_long_traffic_is_clean_and_computes_what_an_unguarded_engine_does(engine, request):
    """Hundreds of forwards of random traffic, with shared prefixes, aborts, flushes and, in a small pool, retractions:
    nothing is found, and the same traffic without Canary, which once uninstalled is gone, has the same outputs."""
    setup = engine.setup
    storm = dict(seed=8, steps=setup.storm_steps, prefix=setup.storm_prefix, new_tokens=min(24, 3 * setup.new_tokens))
    engine.flush()
    engine.findings()
    guarded = engine.storm(**storm)
    assert engine.findings()["violations"] == []
    assert guarded["steps"] >= setup.storm_steps
    name = request.node.callspec.params["engine"]
    assert (guarded["retracted"] > 0) == (name == "pressure")
    # A recurrent state is reused by whoever begins with all that it is of, as nobody does here.
    assert (guarded["cached"] > 0) == (name != "radix_off" and "mamba" not in setup.regions)
    engine.uninstall()
    engine.flush()
    unguarded = engine.storm(**storm)
    # From 0.5.22 on a flush leaves windows in another state, and retractions are of every third forward.
    if not (since("0.5.22") and name in ("swa", "pressure")):
        assert unguarded == guarded
    assert engine.findings() == {"violations": [], "stats": {}, "drafts": {}}
