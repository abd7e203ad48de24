"""``CANARY_ON_VIOLATION=protect`` with recurrent states beside the KV, on real SGLang: no token is given out that was
computed from a state, or from KV, found to be wrong. Bits flip from outside, in SGLang's own tensors."""

import random
from types import SimpleNamespace

import pytest
from actions.test_protection import COMPARED, FINE, MIXED, PRESSURE, part
from canary_sglang.batches.hits import UNSEEN_STATES
from canary_sglang.compat import retraction
from engines.setups import SETUPS, STATES_COVERED_BY
from tools.parked_flips import ENVIRONMENT, OPTIONS, QUIET

pytestmark = pytest.mark.timeout(900)
CORES = pytest.mark.parametrize("core", ["python", "rust"])


def protected(launch, kind, options=None, **settings):
    """An engine with one of `OPTIONS`."""
    fields = {"options": {**OPTIONS[kind], **(options or {})}, "environment": ENVIRONMENT}
    return launch(fields, **{"CANARY_ON_VIOLATION": "protect", **settings})


@pytest.mark.where(pytest.mark.beyond_ci("the core in Rust, which SGLang takes by default"), core="python")
@CORES
def test_no_wrong_answer_from_parked_states_that_changed(launch, core):
    """Bits flip in states that the prefix cache has, and in the KV before them. Each answer is right: the request is
    computed again, the node leaves the cache, and no slot of KV or of a state is lost. Clean requests are not computed
    again."""
    engine = protected(launch, "states", **QUIET, SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=core)
    served = engine.serve_parked(count=12)
    numbers = dict.fromkeys(("right", "recomputed", "retracted", "quarantined", "flipped"), 12)
    assert part(served, *numbers, "lost") == FINE | numbers | {"lost": 0}
    assert {event["region"] for event in engine.events() if event["name"] == "recomputed"} == {"full", "mamba"}
    clean = engine.serve_parked(count=16, seed=1, flips=False, together=4)
    assert part(clean, "right", "recomputed", "aborted", "lost") == FINE | {
        "right": 16, "recomputed": 0, "aborted": 0, "lost": 0,
    }  # fmt: skip


@pytest.mark.beyond_ci("that nothing is done by default, in test_quarantine")
@pytest.mark.parametrize("kind", ["states", "checkpoints"])
def test_by_default_wrong_answers_are_given_out(launch, kind):
    """What the tests beside would see without protect: the flips matter."""
    engine = protected(launch, kind, CANARY_ON_VIOLATION="report", **QUIET)
    assert engine.serve_parked(count=12)["wrong"] > 3


@pytest.mark.beyond_ci(STATES_COVERED_BY)
@pytest.mark.parametrize("late", [False, True])
def test_no_wrong_answer_from_checkpoints_that_changed(launch, late):
    """Mamba-2, whose forwards put states aside, with the overlap scheduler; also where the verdict comes with the
    tokens, as on a GPU, and with Canary's usual looks at states, now and then."""
    engine = protected(launch, "overlap checkpoints", **QUIET, CANARY_STATE_INTERVAL="256")
    if late:
        engine.know_findings_with_tokens()
    served = engine.serve_parked(count=6)
    numbers = dict.fromkeys(("right", "recomputed", "flipped"), 6)
    assert part(served, *numbers, "lost") == FINE | numbers | {"lost": 0}
    assert "hits_unchecked" not in {event["name"] for event in engine.events()}


@pytest.mark.beyond_ci("hits without bytes, in test_protection")
@pytest.mark.parametrize("interval", ["1", "256"])
def test_states_that_nobody_looks_at_are_told(launch, interval):
    """Without checkpoints the state after a decode that is not looked at is parked unknown: an event says so."""
    engine = protected(launch, "states", **QUIET, CANARY_STATE_INTERVAL=interval)
    told = [event["reason"] for event in engine.events() if event["name"] == "hits_unchecked"]
    assert told == ([UNSEEN_STATES] if interval == "256" else [])


@pytest.mark.beyond_ci("a hundredth of it")
def test_no_state_is_lost_over_many_requests(launch):
    """200 flips, eight requests at a time: every request is answered, and all slots are there in the end."""
    engine = protected(launch, "states", {"max_running_requests": 8, "max_total_tokens": 2048}, **QUIET)
    served = engine.serve_parked(count=200, together=8)
    assert part(served, "wrong", "kept", "lost") == FINE | {"wrong": 0, "kept": 0, "lost": 0}
    assert served["right"] + served["error"] == 200


@pytest.mark.where(pytest.mark.beyond_ci(STATES_COVERED_BY), case=["pressure", "mixed", "no cache", "checkpoints"])
@pytest.mark.parametrize("case", ["roomy", "pressure", "mixed", "no cache", "checkpoints"])
def test_bits_that_flip_anywhere_give_no_wrong_answer(launch, case):
    """As for KV alone: bits flip in states and KV of running requests, too, where all that is read is compared. Each
    request ends with the right answer or with an error, and all slots come back."""
    more = {"pressure": PRESSURE, "mixed": MIXED, "no cache": {"disable_radix_cache": True}}.get(case, {})
    checkpoints = case == "checkpoints"
    engine = protected(launch, "overlap checkpoints" if checkpoints else "states", more, **COMPARED)
    count = 12 if checkpoints else 30
    served = engine.storm_of_flips(seed=3, count=count, rate=0.15)
    assert part(served, "wrong", "lost", "emptied") == FINE | {"wrong": 0, "lost": 0, "emptied": True}
    assert served["right"] > count // 3
    assert served["right"] + served["error"] == count
    assert served["recomputed"] + served["aborted"] > 0


@pytest.mark.beyond_ci("the storm, whose running requests end, too")
@pytest.mark.parametrize("interval", ["1", "2"])
def test_a_running_request_with_a_wrong_state_ends_with_an_error(launch, interval):
    """A bit flips in the state of a request that is decoding. Even where each state is compared before it is read, it
    may have changed within the forward before: the request ends with status 503. The one beside it goes on."""
    engine = protected(launch, "states", **COMPARED, CANARY_STATE_INTERVAL=interval)
    prompts = [engine.setup.traffic(seed)[0] for seed in (0, 1)]
    clean = engine.serve(prompts=prompts, new_tokens=30, together=2)["outputs"]
    engine.flush()
    done = engine.rot_running_state(prompts=prompts, source="conv.0")
    good, bad = done["reasons"]
    assert done["outputs"][0] == clean[0]
    assert good["type"] == "length"
    (told,) = [event for event in engine.events() if event["name"] in ("aborted", "recomputed")]
    assert (told["request"], told["region"]) == (done["requests"][1], "mamba")
    assert (told["name"], bad["type"], bad["status_code"]) == ("aborted", "abort", 503)
    assert done["outputs"][1] == clean[1][: len(done["outputs"][1])]


@pytest.mark.beyond_ci("parked states of which no other request has gone on")
@CORES
def test_a_request_that_had_gone_on_from_the_state_before_it_changed_goes_on(launch, core):
    """A request still holds the node of a state when the state is found wrong by another one. Both are computed again,
    so that the node can leave; the first one keeps its tokens, though not all of its reads were compared: it has
    read the state before it changed. A third request is clean."""
    engine = protected(launch, "states", **QUIET, SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=core)
    rng = random.Random(4)
    begin = [rng.randrange(3, 250) for _ in range(40)]
    prompts = [begin + [rng.randrange(3, 250) for _ in range(4)] for _ in range(3)]
    clean = [engine.serve(prompts=[prompt], new_tokens=20)["outputs"][0] for prompt in prompts]
    engine.flush()
    done = engine.share_broken_state(begin=begin, prompts=prompts, new_tokens=20)
    assert done["hit"] == len(begin)
    assert done["outputs"] == clean
    assert done["reasons"] == ["length"] * 3
    assert {fields["request"] for name, fields in done["events"] if name == "recomputed"} == set(done["requests"][:2])
    (gone,) = [fields for name, fields in done["events"] if name == "quarantined"]
    assert gone["evicted_tokens"] >= len(begin)
    assert done["lost"] == 0


def test_states_over_two_stages_are_refused():
    """What was not shown beside states does what quarantine does."""
    args = SimpleNamespace(pp_size=2, enable_dp_attention=False)
    scheduler = SimpleNamespace(server_args=args, is_generation=True, batch_result_processor=SETUPS["mha"])
    assert "recurrent states beside" in str(retraction.withholding_refusal(scheduler, states=True))
    assert retraction.withholding_refusal(scheduler, states=False) is None
