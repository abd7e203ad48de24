"""Real SGLang on a CPU: what the sampler gave is what the next forward computes."""

import pytest
from engines.setups import SPECULATION_COVERED_BY

pytestmark = [pytest.mark.timeout(900)]


def told(engine):
    """Findings that say what the sampler gave: kind, request, position, that token, and the token that was there."""
    found = engine.findings()["violations"]
    return [
        (v["kind"], v["request"], v["position"], v["token"], v["stored_token"])
        for v in found
        if "the sampler gave" in v["explanation"]
    ]


def test_exchanged_next_tokens_are_found(start):
    """The tokens of two requests change places after they were sampled: the forward that computes them tells each
    request, its position, what was sampled, and what was computed. So does a length that is one short. Clean traffic
    before and after is silent, and every decoded token was compared."""
    engine = start("mha")
    setup = engine.setup
    served = engine.serve(prompts=setup.traffic(0), new_tokens=setup.new_tokens)
    clean = engine.findings()
    assert clean["violations"] == []
    assert clean["stats"]["sampled_tokens"] >= sum(len(output) - 1 for output in served["outputs"])
    (a, (at, given)), (b, (bt, other)) = engine.mix_up(what="exchanged", prompts=setup.traffic(1, 4)).items()
    found = told(engine)
    assert {("write_input", a, at, given, other), ("write_input", b, bt, other, given)} <= set(found)
    assert {(position, token) for kind, _, position, token, _ in found if kind == "token"} <= {(at, given), (bt, other)}
    ((name, (position, token)),) = engine.mix_up(what="cut short", prompts=setup.traffic(2, 4)).items()
    assert next(finding[:4] for finding in told(engine)) == ("write_input", name, position, token)
    engine.flush()
    engine.serve(prompts=setup.traffic(3), new_tokens=setup.new_tokens)
    assert engine.findings()["violations"] == []


def test_wrong_answers_are_found(start):
    """What the host appends to the lists of two requests is each other's token, while the device goes on with the right
    ones: told with what was sampled. In clean traffic each answered token is compared."""
    engine = start("mha")
    served = engine.serve(prompts=engine.setup.traffic(0), new_tokens=6)
    clean = engine.findings()
    assert clean["violations"] == []
    assert clean["stats"]["answered_tokens"] == sum(len(output) for output in served["outputs"])
    (a, (at, given)), (b, (bt, other)) = engine.mix_up(what="answered", prompts=engine.setup.traffic(1, 4)).items()
    found = engine.findings()["violations"]
    assert {(v["kind"], v["phase"]) for v in found} == {("token", "event")}
    assert {(v["request"], v["position"], v["stored_token"], v["token"]) for v in found} == {
        (a, at, given, other),
        (b, bt, other, given),
    }


@pytest.mark.takes_turns("the same with the plain loop")
def test_under_the_overlap_scheduler(launch):
    """A forward is issued before the host knows what was sampled: silent in random traffic with aborts, and exchanged
    tokens are told like without it."""
    engine = launch({"options": {"disable_overlap_schedule": False}}, like="mha")
    served = engine.storm_overlapped(seed=3, turns=60, new_tokens=20)
    clean = engine.findings()
    assert clean["violations"] == []
    assert served["aborted"] > 0
    assert clean["stats"]["sampled_tokens"] > sum(len(output) - 1 for output in served["outputs"])
    (a, (at, given)), (b, (bt, other)) = engine.mix_up_overlapped(prompts=engine.setup.traffic(1, 4)).items()
    assert {("write_input", a, at, given, other), ("write_input", b, bt, other, given)} <= set(told(engine))


@pytest.mark.beyond_ci(SPECULATION_COVERED_BY)
@pytest.mark.parametrize(("name", "bug"), [("eagle", "kept draft"), ("eagle", "cut short"), ("ngram", "kept draft")])
def test_lengths_after_a_verification(start, name, bug):
    """A rejected draft is kept, or the length is one short: told with the position and with what was sampled. Clean
    speculation is silent, and the tokens that verifications begin with were compared. What a tree's rejected branches
    wrote is no token of a sequence: to read it is to read a slot that holds nothing."""
    engine = start(name)
    setup = engine.setup
    served = engine.serve(prompts=setup.traffic(0), new_tokens=setup.new_tokens)
    clean = engine.findings()
    assert clean["violations"] == []
    assert clean["stats"]["sampled_tokens"] >= served["verifies"]
    ((request, (position, token)),) = engine.mix_up(what=bug, prompts=setup.traffic(1, 4)).items()
    if name == "ngram":
        found = engine.findings()["violations"]
        assert ("unwritten", request, position) in [(v["kind"], v["request"], v["position"]) for v in found]
        return
    kind = "token" if bug == "kept draft" else "write_input"
    assert (kind, request, position, token) in [finding[:4] for finding in told(engine)]
