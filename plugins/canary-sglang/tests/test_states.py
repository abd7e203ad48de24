"""Recurrent states that are looked at now and then, as by default, on real SGLang."""

import random

import pytest
from engines.setups import CHECKPOINTS, STATES_COVERED_BY

pytestmark = [pytest.mark.timeout(900), pytest.mark.beyond_ci(STATES_COVERED_BY)]


@pytest.mark.parametrize("interval", ["3", "64"])
def test_states_looked_at_now_and_then_raise_nothing(start, interval):
    """Traffic with shared prefixes, whose states stay in the cache as of a forward that wasn't looked at and are reused
    by others: nothing is found, and no state is read without a record."""
    engine = start("short_conv", CANARY_STATE_INTERVAL=interval)
    setup, steps, cached = engine.setup, 0, 0
    for seed in (0, 0, 1):
        served = engine.serve(prompts=setup.traffic(seed), new_tokens=setup.new_tokens)
        steps += served["steps"]
        cached += sum(served["cached"])
    engine.storm(seed=8, steps=60, prefix=20, new_tokens=24)
    found = engine.findings()
    assert found["violations"] == []
    assert cached > 0
    assert found["stats"]["unknown_slots"] == 0
    assert found["stats"]["checked_forwards"] >= steps * len(setup.served)


def test_states_with_our_triton_kernels_raise_nothing(launch):
    """The same with our kernels, interpreted here, which are launched for states, too, when the session starts."""
    engine = launch({"environment": {"CANARY_BACKEND": "triton"}}, "short_conv", CANARY_STATE_INTERVAL="4")
    steps = engine.serve(prompts=engine.setup.traffic(0, 3), new_tokens=6)["steps"]
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["checked_forwards"] == steps * len(engine.setup.served)


def test_states_without_a_prefix_cache_raise_nothing(launch):
    """Linear attention without anything to reuse: each request begins with an empty state, in a slot that another one
    had."""
    engine = launch({"options": {"disable_radix_cache": True, "max_mamba_cache_size": 4}}, "kimi_delta")
    served = engine.serve(prompts=engine.setup.traffic(0), new_tokens=4)
    again = engine.serve(prompts=engine.setup.traffic(0), new_tokens=4)
    found = engine.findings()
    assert found["violations"] == []
    assert served["outputs"] == again["outputs"]
    assert sum(served["cached"]) == 0
    assert found["stats"]["unknown_slots"] == 0
    assert found["stats"]["checked_forwards"] == (served["steps"] + again["steps"]) * len(engine.setup.served)


def checkpointing(launch, options=None, **settings):
    """Linear attention with `CHECKPOINTS`."""
    return launch({"options": {**CHECKPOINTS, **(options or {})}}, "gated_delta", **settings)


@pytest.mark.parametrize("interval", ["1", "64"])
def test_checkpoints_from_inside_of_a_forward_raise_nothing(launch, interval):
    """They are reused by others, as states that are known in full: nothing is found, and nothing is read that isn't
    known, also where hardly a decode is looked at."""
    engine = checkpointing(launch, CANARY_STATE_INTERVAL=interval)
    r = random.Random(0)
    shared, other = ([r.randrange(3, 250) for _ in range(length)] for length in (70, 60))
    long = [r.randrange(3, 250) for _ in range(140)]
    cached, steps = [], 0
    for tail in ([], [5, 6], [7]):
        served = engine.serve(prompts=[shared + tail, other + tail, long + tail], new_tokens=6)
        cached.append(served["cached"])
        steps += served["steps"]
    found = engine.findings()
    assert found["violations"] == []
    assert cached[0] == [0, 0, 0]
    assert min(min(row[0], row[2]) for row in cached[1:]) >= 64
    assert found["stats"]["unknown_slots"] == 0
    assert found["stats"]["checked_forwards"] == steps * len(engine.setup.served)
    checkpoints = engine.cached_states()
    assert len(checkpoints) > 2
    assert all(state["tokens"] and state["bytes"] for state in checkpoints)


@pytest.mark.parametrize("overlapped", [False, True])
def test_random_traffic_with_checkpoints_raises_nothing(launch, overlapped):
    """Requests in bursts, with aborts, under pressure for states; decodes that pass where checkpoints are due, also
    under the overlap scheduler. Canary and the allocator agree in the end on which states are free."""
    options = {"max_mamba_cache_size": 24, "disable_overlap_schedule": not overlapped}
    engine = checkpointing(launch, options, CANARY_STATE_INTERVAL="64")
    if overlapped:
        engine.storm_overlapped(seed=5, turns=80, new_tokens=70)
    else:
        assert engine.storm(seed=5, steps=50, prefix=130, new_tokens=16)["cached"] > 0
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["unknown_slots"] == 0
    assert engine.ownership()["mamba"]["differences"] == []
    assert "lifetime_off" not in {event["name"] for event in engine.events()}


def test_what_is_wrong_with_a_checkpoint_is_found(launch):
    """A bit of it that flips in the prefix cache; one that is reused at another position, or for another prompt."""
    engine = checkpointing(launch, CANARY_STATE_INTERVAL="64")
    r = random.Random(1)
    prompts = [[r.randrange(3, 250) for _ in range(length)] for length in (70, 80, 128 + 12)]
    for prompt in prompts:
        engine.serve(prompts=[prompt], new_tokens=2)
    assert engine.findings()["violations"] == []
    checkpoints = {state["slot"]: state["tokens"] for state in engine.cached_states()}
    assert sorted(checkpoints.values()) == [64, 64, 128]
    (longest,) = [slot for slot, tokens in checkpoints.items() if tokens == 128]
    flipped: list[str] = []
    for seed, source in enumerate(engine.regions()["mamba"]["sources"]):
        engine.flip(region="mamba", source=source, seed=seed, among=[longest])
        engine.serve(prompts=[prompts[2]], new_tokens=1)
        found = engine.findings()["violations"]
        flipped.append(source)
        told = [(v["kind"], v["slot"], f"{v['half']}.{v['layer']}") for v in found if v["phase"] == "pre_forward"]
        assert told == [("bytes", longest, source)]
        # What flipped in it by now is also found where the request has its clone.
        clones = [v for v in found if v["phase"] == "event"]
        assert {(v["kind"], f"{v['half']}.{v['layer']}") for v in clones} == {("bytes", name) for name in flipped}
        assert len({v["slot"] for v in clones} - {longest}) == 1
        assert len(found) == len(told) + len(clones)
    engine.reuse_wrong_state(slot=longest, prompt=prompts[0])
    (found,) = [v for v in engine.findings()["violations"] if v["phase"] != "event"]
    assert (found["kind"], found["region"], found["slot"]) == ("position", "mamba", longest)
    for slot in (slot for slot, tokens in checkpoints.items() if tokens == 64):
        engine.reuse_wrong_state(slot=slot, prompt=prompts[0])
    found = engine.findings()["violations"]
    assert [(v["kind"], v["region"]) for v in found] == [("token", "mamba")]


def test_a_decodes_checkpoint_of_another_request_is_found(launch):
    """Two requests pass the 64th token in one decode, and each one's checkpoint becomes a copy of the other's state:
    both are found at once, in all that they hold. With SGLang's own copy nothing was found."""
    engine = checkpointing(launch, CANARY_STATE_INTERVAL="64", CANARY_READ_CHECK="0")
    r = random.Random(3)
    prompts = [[[r.randrange(3, 250) for _ in range(60)] for _ in range(2)] for _ in range(2)]
    engine.serve(prompts=prompts[0], new_tokens=8)
    assert engine.findings()["violations"] == []
    assert sorted(state["tokens"] for state in engine.cached_states())[-2:] == [64, 64]
    engine.break_copies(how="checkpoint_another")
    engine.serve(prompts=prompts[1], new_tokens=8)
    found = engine.findings()["violations"]
    assert {(v["kind"], v["region"], v["phase"], v["stored_position"]) for v in found} == {
        ("bytes", "mamba", "event", 63)
    }
    assert len({v["slot"] for v in found}) == 2
    assert {f"{v['half']}.{v['layer']}" for v in found} == set(engine.regions()["mamba"]["sources"])


def test_a_state_of_other_tokens_is_found_though_it_is_as_long_and_ends_alike(start):
    """Two prompts of the same length, with the same last token, as chat templates make them. The state of one, reused
    for the other, is not of the tokens whose KV is reused with it."""
    engine = start("short_conv", CANARY_STATE_INTERVAL="64")
    r = random.Random(2)
    one, two = ([*(r.randrange(3, 250) for _ in range(29)), 7] for _ in range(2))
    for prompt in (one, two):
        engine.serve(prompts=[prompt], new_tokens=1)
    slots = [state["slot"] for state in engine.cached_states() if state["tokens"] == 30]
    assert len(slots) == 2
    assert engine.serve(prompts=[[*one, 8]], new_tokens=1)["cached"] == [30]
    assert engine.findings()["violations"] == []
    for tail, slot in enumerate(slots):
        engine.reuse_wrong_state(slot=slot, prompt=[*one, 9 + tail])
    (found,) = engine.findings()["violations"]
    assert (found["kind"], found["region"], found["phase"]) == ("prefix", "mamba", "pre_forward")
    assert found["slot"] in slots


@pytest.mark.parametrize(
    ("what", "kind"), [("double_free", "double_free"), ("free_in_use", "freed"), ("hand_out_held", "double_alloc")]
)
def test_misuse_of_states_is_found_as_what_it_is(start, what, kind):
    """A free state that is freed again, one that is freed while its request runs, and one that is handed out while it
    is held: found as what it is, with the request whose state it is."""
    engine = start("short_conv")
    engine.serve(prompts=engine.setup.traffic(0, 4), new_tokens=2)
    assert engine.findings()["violations"] == []
    done = engine.misuse_states(what=what, prompts=engine.setup.traffic(1, 4)[2:])
    found = [v for v in done["violations"] if v["region"] == "mamba" and v["kind"] == kind]
    assert {v["slot"] for v in found} == {done["slot"]}
    if what != "double_free":
        assert {v["stored_request"] for v in found} == {done["request"]}
