"""What makes the guard of a running engine blind, broken from outside: vLLM serves on, and it is told."""

import inspect
from contextlib import contextmanager

import pytest
from vllm_on_cpu import guarded

from canary_core import Patches

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]
LLAMA = pytest.mark.parametrize("engine", ["llama"], indirect=True)


@contextmanager
def passed_by(small, name):
    """The engine's runner is of a class that has ``name`` of its own, as vLLM wrote it: our hook of vLLM's class is not
    called."""
    right = type(small.runner)
    own = type("OwnRunner", (right,), {name: inspect.unwrap(getattr(right, name))})
    small.runner.__class__ = own
    try:
        yield
    finally:
        small.runner.__class__ = right


@contextmanager
def without_messages(small, lost):
    """What travels with the scheduler's outputs is lost on the way: of those whose number ``lost`` says so."""
    patches, count = Patches(), []

    def dropped(output, *args, **kwargs):
        count.append(1)
        if lost(len(count)):
            vars(output).pop("canary_lifetime")

    patches.follow(small.scheduler, "schedule", dropped)
    try:
        yield
    finally:
        patches.undo()


@LLAMA
@pytest.mark.parametrize("name", ["_model_forward", "execute_model"])
def test_a_runner_that_passes_our_hook_by_is_told(engine, name):
    """All tokens that the scheduler gave out are missing, by a figure that does not come from that hook: told when all
    is counted, and in the summary, which is a warning. Answers are those without Canary."""
    small = engine.small
    small.renew()
    plain = guarded.traffic(small, 1)
    with passed_by(small, name), guarded.guard(small, read_check=64) as guard:
        answers = guarded.traffic(small, 1)
        guard.canary.drain()
        witness = guard.canary.witness
        event = witness.settle()
        computed = witness.computed_tokens
    assert answers == plain
    assert (event.name, event.fields["missing_tokens"]) == ("unguarded_tokens", computed)
    assert computed > 300
    (summary,) = guard.findings.told("summary")
    assert summary.level == "warning"
    assert any(f"{computed} of {computed} tokens" in warning for warning in summary.fields["warnings"])
    assert [e.level for e in guard.findings.told("silence")] == (["error"] if name == "_model_forward" else [])


@LLAMA
@pytest.mark.parametrize(
    ("lost", "reason"),
    [(lambda number: number == 4, "message 4 of the scheduler came where 3 was due"), (lambda n: n > 3, "3 outputs")],
)
def test_messages_of_the_scheduler_that_are_lost_are_told(engine, lost, reason):
    """One is noticed by the next one's number; where none comes any more, after three outputs. Forwards are guarded
    all the same, and nothing is found."""
    small = engine.small
    with guarded.guard(small) as guard, without_messages(small, lost):
        guarded.traffic(small, 1)
        (told,) = guard.trouble()
        assert "lifetime_off" in told
        assert reason in told
