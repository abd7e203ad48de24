"""Real SGLang whose own copies go wrong: what lies at the destination is judged by what was at the source."""

import pytest
from engines.setups import HICACHE_COVERED_BY, SPECULATION_COVERED_BY, STATES_COVERED_BY

pytestmark = pytest.mark.timeout(1800)

speculates = pytest.mark.beyond_ci(SPECULATION_COVERED_BY)
has_states = pytest.mark.beyond_ci(STATES_COVERED_BY)

QUIET = {"CANARY_READ_CHECK": "0"}
"""As by default: no bytes are compared before they are read."""


def tree(start, how, name="eagle_tree", **settings):
    """What is found first where SGLang verifies a tree and its copy is broken; nothing was found before."""
    engine = start(name, **QUIET, **settings)
    prompts = engine.setup.traffic(0)
    engine.serve(prompts=prompts, new_tokens=engine.setup.new_tokens)
    assert engine.findings()["violations"] == []
    engine.break_copies(how=how)
    found = engine.serve_until_found(prompts=prompts, new_tokens=12)["violations"]
    assert {"disabled", "unguarded_forward"}.isdisjoint(event["name"] for event in engine.events())
    return found


@speculates
def test_a_trees_accepted_path_that_is_moved_without_its_v(start):
    """V of another drafted token stays in the slot: found in every layer's V, as a copy, and nowhere else."""
    found = tree(start, "move_only_keys")
    copied = [v for v in found if v["phase"] == "event"]
    assert {(v["kind"], v["half"], v["region"]) for v in copied} == {("bytes", "v", "full")}
    assert {v["layer"] for v in copied} == {0, 1, 2}
    assert all(v["explanation"].startswith("the bytes that were copied or loaded to slot ") for v in copied)
    assert {v["kind"] for v in found} == {"bytes"}


@speculates
@pytest.mark.parametrize("name", ["eagle_tree", "ngram"])
def test_a_trees_accepted_path_that_is_moved_from_elsewhere(start, name):
    """K and V of another token are moved: both are found."""
    found = tree(start, "move_from_the_next_slot", name)
    assert {(v["kind"], v["half"]) for v in found if v["phase"] == "event"} == {("bytes", "k"), ("bytes", "v")}


@speculates
def test_a_trees_accepted_path_that_is_not_moved_at_all(start):
    """Nobody tells of a move, so the accepted tokens should have been written where they are looked for: they are lost
    writes, in K and V of every layer."""
    found = tree(start, "move_nothing")
    lost = {(v["layer"], v["half"]) for v in found if v["kind"] == "lost_write"}
    assert lost == {(layer, half) for layer in range(3) for half in "kv"}


@has_states
@pytest.mark.parametrize("how", ["clone_nothing", "never_clone", "clone_convolutions_only"])
def test_a_cached_state_that_is_not_cloned(start, how):
    """A prefix hit whose recurrent state, or a part of it, does not get to the request's own slot: found there with
    layer and half, in the forward that reads it; the request that had it before is named. Without that all is well."""
    engine = start("mamba2", **QUIET)
    prompt, other = ([(number * i) % 240 + 3 for i in range(30)] for number in (7, 11))
    engine.serve(prompts=[prompt, other], new_tokens=2)
    assert engine.serve(prompts=[[*prompt, 5]], new_tokens=2)["cached"] == [30]
    assert engine.findings()["violations"] == []
    engine.break_copies(how=how)
    assert engine.serve(prompts=[[*prompt, 6]], new_tokens=2)["cached"] == [30]
    found = [v for v in engine.findings()["violations"] if v["phase"] == "event"]
    halves = {"ssm"} if how == "clone_convolutions_only" else {"ssm", "conv"}
    assert {(v["kind"], v["region"], v["half"], v["layer"]) for v in found} == {
        ("bytes", "mamba", half, layer) for half in halves for layer in range(2)
    }
    assert len({v["slot"] for v in found}) == 1
    assert all("the bytes that were copied or loaded to slot" in v["explanation"] for v in found)
    assert "disabled" not in {event["name"] for event in engine.events()}


@pytest.mark.beyond_ci(HICACHE_COVERED_BY)
@pytest.mark.parametrize("how", ["park_only_keys", "load_only_keys"])
def test_kv_that_goes_to_host_memory_without_its_v(start, how):
    """On its way out or back: found when it is back, in every layer's V, with who wrote it."""
    engine = start("hicache", **QUIET)

    def prompts(seed):
        return [[3 + (seed * 97 + 31 * i + j * j) % 240 for j in range(40)] for i in range(8)]

    for seed in (1, 2, 1):
        engine.serve(prompts=prompts(seed), new_tokens=4)
    assert engine.arrivals()["loaded_slots"] > 0
    assert engine.findings()["violations"] == []
    engine.break_copies(how=how)
    for seed in (3, 4, 3):
        engine.serve(prompts=prompts(seed), new_tokens=4)
    found = [v for v in engine.findings()["violations"] if v["phase"] == "event"]
    assert {(v["kind"], v["half"], v["layer"]) for v in found} == {("bytes", "v", layer) for layer in range(3)}
    assert all(v["stored_request"].startswith("r") for v in found)
    assert all("the bytes that were copied or loaded to slot" in v["explanation"] for v in found)
