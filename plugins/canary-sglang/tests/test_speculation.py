"""Real speculative decoding on a CPU: what the target accepts, rejects and moves raises nothing."""

import pytest
from engines.setups import SPECULATION_COVERED_BY
from tools.fault_injection import FAULTS

pytestmark = [pytest.mark.timeout(1800), pytest.mark.beyond_ci(SPECULATION_COVERED_BY)]


@pytest.mark.parametrize("name", ["eagle", "eagle_tree", "eagle_pressure", "eagle_pages", "standalone", "ngram"])
def test_clean_speculation_raises_nothing(start, name):
    """Prefix hits, accepted tokens, trees whose accepted path is moved, retraction: no finding, and no slot that is
    read is unknown, in the target's pool and in the draft's. Canary and the allocator agree on which slots are free,
    those that are handed out ahead of their use too, and after a flush. What the scheduler says was computed, with
    either model, is what was recorded."""
    engine = start(name)
    traffic, served = engine.setup, []
    for seed in (0, 0):
        served.append(engine.serve(prompts=traffic.traffic(seed), new_tokens=traffic.new_tokens))
        assert engine.ownership()["full"]["differences"] == []
    found = engine.findings()
    assert found["violations"] == []
    assert set(engine.regions()) == set(traffic.regions)
    for stats in (found["stats"], *found["drafts"].values()):
        assert stats["checked_slots"] > 0
        assert stats["recorded_slots"] > 0
        assert stats["unknown_slots"] == 0
        assert stats["computed_tokens"] == stats["guarded_tokens"] > 0
    assert engine.flush()
    assert engine.ownership()["full"]["differences"] == []
    assert {"disabled", "unguarded_forward", "lifetime_off"}.isdisjoint(event["name"] for event in engine.events())
    assert sum(served[1]["cached"]) > 0
    assert (sum(turn["retracted"] for turn in served) > 0) == (name == "eagle_pressure")
    verifies = sum(turn["verifies"] for turn in served)
    decoded = sum(len(output) - 1 for turn in served for output in turn["outputs"])
    assert 0 < verifies < decoded


def test_refused_draft_models_leave_the_target_clean(start):
    """Multi-layer EAGLE: the pool of each of its draft models is named as not guarded; the target's is guarded, without
    a finding, and its allocator followed."""
    engine = start("eagle_layers")
    traffic = engine.setup
    served = [engine.serve(prompts=traffic.traffic(0, 3), new_tokens=traffic.new_tokens) for _ in range(2)]
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["checked_slots"] > 0
    assert found["stats"]["unknown_slots"] == 0
    assert set(engine.regions()) == {"full"}
    assert engine.ownership()["full"]["differences"] == []
    left_out = [item for event in engine.events() if event["name"] == "coverage" for item in event["uncovered"]]
    assert [item["name"] for item in left_out] == ["draft/pool", "draft1/pool", "draft2/pool"]
    assert all("multi-layer" in item["reason"] for item in left_out)
    assert sum(turn["verifies"] for turn in served) > 0


@pytest.mark.parametrize("name", ["eagle", "standalone"])
def test_what_breaks_is_found_in_a_draft_models_pool(start, name):
    """A flipped bit in each source, and each fault of the core, where only the draft model reads."""
    engine = start(name)

    def prompts(seed):
        return [prompt[:24] for prompt in engine.setup.traffic(seed, 4)]

    engine.serve(prompts=prompts(3), new_tokens=4)
    for seed, source in enumerate(engine.regions()["draft/full"]["sources"]):
        slot = engine.flip_and_scrub(region="draft/full", source=source, seed=seed)
        half, layer = source.split(".")
        told = [(v["kind"], v["region"], v["slot"], v["layer"], v["half"]) for v in engine.findings()["violations"]]
        assert told == [("bytes", "draft/full", slot, int(layer), half)]
    engine.flush()
    for n, fault in enumerate(FAULTS):
        for attempt in range(3):
            text = f"{fault}:warmup=2,region=draft/full"
            done = engine.inject(text=text, prompts=prompts(20 + n + 50 * attempt), new_tokens=6)
            assert len(done["injections"]) == 1, text
            assert done["explained"] == [True] or done["rewritten"] == [True], text
            if done["explained"] == [True]:
                break
        assert done["explained"] == [True], text


def test_an_allocator_under_speculation_is_followed(start):
    """Random traffic with aborts and retractions: slots that were drafted into, rejected, given back and handed out
    again raise nothing, and Canary's list of free slots stays the allocator's."""
    engine = start("eagle_pressure")
    retracted = 0
    for seed in (1, 2):
        retracted += engine.storm(seed=seed, steps=40, prefix=20, new_tokens=24)["retracted"]
        assert engine.findings()["violations"] == []
        assert engine.ownership()["full"]["differences"] == []
    assert retracted > 0


def test_speculation_under_the_overlap_scheduler(start):
    """A forward is issued before the last one's results are known, so requests end, and give their slots back, while
    one that writes to them is in flight: nothing is found, and both know the same slots to be free."""
    engine = start("eagle_overlap")
    served = engine.storm_overlapped(seed=5, turns=40, new_tokens=24)
    found = engine.findings()
    assert found["violations"] == []
    assert served["aborted"] > 0
    assert 0 < served["verifies"] < sum(len(output) for output in served["outputs"])
    assert found["stats"]["checked_slots"] > 0
    assert engine.ownership()["full"]["differences"] == []
    assert {"disabled", "unguarded_forward", "lifetime_off"}.isdisjoint(event["name"] for event in engine.events())
