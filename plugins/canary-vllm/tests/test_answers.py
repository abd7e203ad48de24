"""Tokens that vLLM's scheduler appends to its requests, against what the sampler gave. Clean traffic: `test_engine`."""

import inspect
from contextlib import contextmanager

import pytest
from vllm_on_cpu import guarded

import canary_adapters.answers
from canary_core import Kind, Patches, Phase

pytestmark = [pytest.mark.timeout(600)]
REPEATED = [5, 6, 7, 8] * 6
BROKEN_AT = 5


def of(name: str, process: int = 0):
    """An engine of `vllm_on_cpu.setups`."""
    return pytest.param(name, marks=pytest.mark.xdist_group(f"process {process}"))


@contextmanager
def appended(how, name):
    """vLLM's scheduler appends tokens of the request ``name`` wrongly: one is ``dropped``, or ``replaced``; or each is
    a step ``late``, so that one comes twice. Yields what it was given of each request, and whether it went wrong."""
    from vllm.v1.request import Request

    given, done, right = {}, [], Request.append_output_token_ids

    def append(request, tokens):
        own = given.setdefault(request.request_id, [])
        for token in [tokens] if isinstance(tokens, int) else tokens:
            own.append(token)
            kept = [token]
            if request.request_id == name and len(own) > BROKEN_AT and (done or token != own[-2]):
                once, done[:] = not done, [True]
                if how == "late":
                    kept = [own[-2]]
                elif once:
                    kept = [] if how == "dropped" else [token ^ 1]
            right(request, kept)

    Request.append_output_token_ids = append
    try:
        yield given, done
    finally:
        Request.append_output_token_ids = right


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        pytest.param("async", "dropped", marks=pytest.mark.xdist_group("process 0")),
        # The other ways to go wrong differ in what the test breaks only; tests/adapters/test_answers.py has them all.
        *(
            pytest.param(engine, how, marks=(pytest.mark.xdist_group(f"process {process}"), pytest.mark.beyond_ci))
            for engine, process, broken in (("async", 0, ("late", "replaced")), ("ngram", 1, ("late", "replaced")))
            for how in broken
        ),
    ],
    indirect=["engine"],
)
def test_a_token_that_the_scheduler_appends_wrongly_is_told(engine, how):
    """The first position at which a request's list is not what was sampled is named, once, with what was sampled, and
    before the next lists but one; the request beside it is not. With a token too few only the asynchronous scheduler
    goes on: the plain one waits forever."""
    small = engine.small
    with guarded.guard(small, incident_tokens=True) as guard, appended(how, "a") as (given, done):
        small.submit("a", REPEATED, 60)
        small.submit("b", [token + 50 for token in REPEATED], 60)
        request, steps = small.scheduler.requests["a"], 0
        while not done:
            small.step()
        while steps < 12 and not of_lists(guard):
            small.step()
            guard.canary.drain()
            steps += 1
        listed, found = list(request.output_token_ids), of_lists(guard)
        wrong = next(i for i, token in enumerate(listed) if token != given["a"][i])
        (violation,) = found
        assert (violation.request, violation.position) == ("a", len(REPEATED) + wrong)
        assert (violation.token, violation.stored_token) == (listed[wrong], given["a"][wrong])
        assert how != "dropped" or "as if a token had been dropped" in violation.explanation
        small.scheduler.finish_requests(["a", "b"], aborted())
        # What was computed ahead of the scheduler is waited for.
        small.serve([REPEATED], 2, "last")


def aborted():
    """vLLM's status of a request that its client gave up."""
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def of_lists(guard):
    """What was told of lists."""
    return [v for v in guard.findings.violations if v.kind is Kind.TOKEN and v.phase is Phase.EVENT]


@pytest.mark.parametrize("engine", [of("async")], indirect=True)
def test_lists_are_compared_to_the_last_token(engine):
    """Of requests that run, and of those that end before their turn: for each token it is known what was sampled."""
    small = engine.small
    with guarded.guard(small) as guard:
        small.serve(guarded.prompts("lists"), 5)
        small.serve(guarded.prompts("after", 2), 30, "after")
        assert guard.trouble() == []
        stats = guard.canary.stats()
    # The last lists wait for one more forward.
    assert stats["answered_tokens"] >= 8 * 5 + 2 * 12
    assert stats.get("answers_unknown", 0) == 0


@pytest.mark.parametrize("engine", [of("async")], indirect=True)
def test_that_nothing_is_compared_is_told(engine, monkeypatch):
    """A runner with a sampler of its own, which is not hooked; outputs that lose the lists on their way."""
    small, right = engine.small, type(engine.small.runner)
    monkeypatch.setattr(canary_adapters.answers, "BLIND_TOKENS", 40)
    monkeypatch.setattr(canary_adapters.answers, "BLIND_STEPS", 12)
    own = type("OwnRunner", (right,), {"_sample": inspect.unwrap(right._sample)})
    with guarded.guard(small) as guard:
        small.runner.__class__ = own
        try:
            small.serve(guarded.prompts("own", 4), 30)
        finally:
            small.runner.__class__ = right
        (told,) = guard.findings.told("answers_unchecked")
        assert "what was sampled" in told.fields["reason"]
        assert of_lists(guard) == []
    patches = Patches()
    with guarded.guard(small) as guard:
        patches.follow(small.scheduler, "schedule", lambda output, *_, **__: vars(output).pop("canary_answers", None))
        try:
            small.serve(guarded.prompts("lost", 4), 30)
        finally:
            patches.undo()
        (told,) = guard.findings.told("answers_unchecked")
        assert "12 forwards came without" in told.fields["reason"]
