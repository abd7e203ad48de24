"""`canary_suspect`: whoever suspects a request has it verified, and hears the verdict as an event."""

from concurrent.futures import Future

import pytest
from support.guarded import Guarded
from support.toy import ToyEngine

import canary_core
from canary_core import CanaryError, Verification
from canary_desk.control.suspects import MOST_SUSPECTS


class Verifier:
    """Keeps what it is asked for."""

    def __init__(self):
        self.asked = []

    def ask(self, request=None):
        self.asked.append((request, Future()))
        return self.asked[-1][1]


@pytest.fixture
def suspected():
    """A guarded engine with a verifier; others of this process are closed before."""
    g = Guarded(ToyEngine())
    g.canary.verifier = Verifier()
    yield g
    g.canary.close()


def suspect(request="r7"):
    """As a plugin does."""
    canary_core.suspect(request, "NaN logits")


def told(g):
    """The events of verdicts, without their place."""
    about = ("request", "suspected", "verdict", "reason")
    return [
        (event.level, {name: event.fields[name] for name in about if name in event.fields})
        for event in g.findings.told("verified")
    ]


def test_the_verdict_is_told(suspected):
    """Once it is there, with the finding if there is one."""
    suspect()
    ((request, answer),) = suspected.canary.verifier.asked
    assert (request, told(suspected)) == ("r7", [])
    answer.set_result([Verification("r7", 64, "differs", None, "layer 1 is another")])
    about = {"request": "r7", "suspected": "NaN logits", "verdict": "differs", "reason": "layer 1 is another"}
    assert told(suspected) == [("warning", about)]
    suspect()
    suspected.canary.verifier.asked[1][1].set_result([Verification("r7", 64, "same")])
    assert told(suspected)[1] == ("info", {"request": "r7", "suspected": "NaN logits", "verdict": "same"})


def test_no_verdict_says_why(suspected):
    """A failure, an end, and an engine that has no verifier."""
    for _ in range(2):
        suspect()
    failed, ended = (answer for _, answer in suspected.canary.verifier.asked)
    failed.set_exception(CanaryError("request 'r7' is not running"))
    ended.cancel()
    suspected.canary.verifier = None
    suspect()
    assert {about["verdict"] for _, about in told(suspected)} == {"unjudged"}
    reasons = [about["reason"] for _, about in told(suspected)]
    assert "is not running" in reasons[0]
    assert "the engine ended" in reasons[1]
    assert "no recomputer" in reasons[2]


def test_too_many_are_counted_and_not_asked_for(suspected):
    """Until some were answered."""
    for n in range(MOST_SUSPECTS + 3):
        suspect(f"r{n}")
    asked = suspected.canary.verifier.asked
    assert len(asked) == MOST_SUSPECTS
    assert suspected.canary.stats()["suspects_left_out"] == 3
    for _, answer in asked:
        answer.set_result([])
    suspect("later")
    assert asked[-1][0] == "later"
