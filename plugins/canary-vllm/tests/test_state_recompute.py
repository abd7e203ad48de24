"""Recurrent states of requests that vLLM's scheduler has computed again: clean ones are never told, broken ones are,
by the states alone. The engine goes on while they are computed, in chunks, too."""

import pytest
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded, verified

from canary_adapters import HeldStates
from canary_core import Kind

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]
QUIET = dict(read_check=0, scrub_budget="0", bytes="off")
"""All checks of bytes are off."""
OTHER_WAY = pytest.mark.takes_turns("the same in another type, or one step behind")


@pytest.fixture(scope="module")
def folder():
    """Of Falcon-H1, with weights that matter."""
    return verified.weighty_hybrid("falcon_h1")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", False), id="float32"),
        pytest.param(("float32", True), id="float32-async"),
        pytest.param(("bfloat16", True), id="bfloat16-async", marks=OTHER_WAY),
    ],
)
def small(request, folder):
    """With asynchronous scheduling a token of which nothing was computed is always on its way."""
    from vllm_on_cpu.engine import SmallEngine

    dtype, ahead = request.param
    options = dict(load_format="auto", num_gpu_blocks_override=48, max_num_seqs=12, enable_prefix_caching=False)
    return SmallEngine(folder, dtype=dtype, async_scheduling=ahead, **options)


def exact(small):
    """Skips what is not computed in 32 bits: there states are too far from each other for small faults."""
    if "float32" not in str(small.runner.model_config.dtype):
        pytest.skip("small faults are found in 32-bit floats")


def told(guard):
    """Source, request and rule of each finding of a recompute; there is none of another kind."""
    guard.canary.drain()
    found = guard.findings.violations
    assert {v.kind for v in found} <= {Kind.RECOMPUTE}, found
    return [(v.source, v.request, v.rule) for v in found]


def with_states(answers):
    """Those in which states were compared."""
    return [answer for answer in answers if any(one.region == "state" for one in answer.layers)]


def rounds(small, count, decoded):
    """Three requests at a time, long prompts in chunks of 64 tokens beside short ones. Gives all answers."""
    made = []
    for turn in range(count):
        for i in range(3):
            small.submit(f"{turn} {i}", verified.prompt(f"{turn} {i}", (20, 45, 110)[(turn + i) % 3]), decoded)
        verified.finish(small)
        made += [small.answers[f"{turn} {i}"] for i in range(3)]
    return made


def teach(small):
    """Noise of the states, too, and of as many decodes as the tests have."""
    (session,) = HOOKS.sessions
    for turn in range(40):
        if session.recomputed.judge.noise.known and not session.recomputed.judge.noise.lacks_states:
            return
        names = [f"teach {turn} {i}" for i in range(3)]
        verified.begin(small, 50, {name: verified.prompt(name, 30) for name in names})
        verified.verify(small, *names)
        small.core.abort_requests(names)
        verified.finish(small)
    raise AssertionError("the noise is not known after 120 fresh requests")


def begin(small, *names):
    """Requests that have decoded 40 tokens."""
    verified.begin(small, verified.DECODED, {name: verified.prompt(name, 30) for name in names})


def test_clean_traffic_is_well_and_answers_stay_the_same(small):
    """States are compared in all of it but what comes of decodes of which no noise is known."""
    small.renew()
    plain = rounds(small, 40, 70)
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        assert rounds(small, 40, 70) == plain
        (session,) = HOOKS.sessions
        answers = list(session.recomputed.answers)
        same = [answer for answer in answers if answer.verdict == "same"]
        assert len(answers) >= 60
        assert {answer.verdict for answer in answers} <= {"same", "unjudged"}
        assert len(with_states(same)) == len(same) > 40
        if "float32" in str(small.runner.model_config.dtype):
            # In 16 bits the bound of some states is so large that nearly anything hides.
            assert guard.canary.stats().get("recompute_left_out", 0) == 0
        assert told(guard) == []
        assert small.scheduler.requests == {}


def test_states_of_two_requests_that_are_exchanged_are_found(small):
    """Between two forwards: in both, and in no other; all KV is right."""
    with guarded.guard(small, **QUIET) as guard:
        teach(small)
        begin(small, "a", "b", "well")
        for one, other in zip(verified.states(small, "a", 1), verified.states(small, "b", 1), strict=True):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        answers = verified.verify(small, "a", "well")
        verified.finish(small)
        assert [answer.verdict for answer in answers] == ["differs", "same"], answers[0].table()
        assert [(request, rule) for _, request, rule in told(guard)] == [("a", "state")]


def test_a_state_that_was_scaled_is_found(small):
    """By a tenth."""
    exact(small)
    with guarded.guard(small, **QUIET) as guard:
        teach(small)
        begin(small, "ill", "well")
        verified.states(small, "ill", 1)[1].mul_(1.1)
        answers = verified.verify(small, "ill", "well")
        verified.finish(small)
        assert [answer.verdict for answer in answers] == ["differs", "same"], answers[0].table()
        assert told(guard) == [("ssm.3", "ill", "state")]


def test_a_layer_that_keeps_its_states_as_they_were_is_found(small):
    """In each decode, in the last layer, so that no KV is wrong."""
    exact(small)
    with guarded.guard(small, **QUIET) as guard:
        teach(small)
        with verified.idle_state(small, 1, "ill"):
            begin(small, "ill", "well")
        answers = verified.verify(small, "ill", "well")
        verified.finish(small)
        assert [answer.verdict for answer in answers] == ["differs", "same"], answers[0].table()
        assert [(request, rule) for _, request, rule in told(guard)] == [("ill", "state")]


def test_without_memory_for_a_copy_states_are_said_to_be_left_out(small, monkeypatch):
    """In the answer, by the counter and an event. The KV has its verdict."""
    exact(small)
    monkeypatch.setattr(HeldStates, "_fits", lambda held: False)
    with guarded.guard(small, **QUIET) as guard:
        begin(small, "a")
        (answer,) = verified.verify(small, "a")
        small.core.abort_requests(["a"])
        verified.finish(small)
        assert {one.region for one in answer.layers} == {"full"}
        assert {name.split()[0] for name in answer.uncompared} == {"state"}
        assert guard.canary.stats()["recompute_left_out"] == 1
        assert len(guard.findings.told("recompute_left_out")) == 1
        assert told(guard) == []
