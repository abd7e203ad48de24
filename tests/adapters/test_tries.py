"""`Tries`: whether a request with wrong KV is computed again."""

from canary_adapters import Tries, leaked


def test_protect_computes_again_twice_what_is_right_so_far():
    """A third time, and where a token that was given out may be wrong, the request ends."""
    tries = Tries[str]("protect", {})
    assert [tries.again("a", stands=True) for _ in range(3)] == [True, True, False]
    assert not tries.again("b", stands=False)


def test_quarantine_keeps_tokens_that_may_be_wrong_and_abort_ends_at_once():
    """With quarantine a fault that stays ends the request, too."""
    assert [Tries[str]("quarantine", counts).again("a", stands=False) for counts in ({}, {"a": 2})] == [True, False]
    assert not Tries[str]("abort", {}).again("a", stands=True)


def test_findings_of_tokens_that_were_taken_back_are_known():
    """Of the same forward and those before it, until the request is forgotten; an unknown step is new."""
    tries = Tries[str]("protect", {})
    assert tries.again("a", stands=True, step=7)
    assert [tries.taken_back("a", step) for step in (0, 6, 7, 8)] == [False, True, True, False]
    tries.keep(["b"])
    assert ("a" in tries, tries.taken_back("a", 7)) == (False, False)
    tries.began("a")
    assert "a" in tries
    assert [tries.again("a", stands=True) for _ in range(3)] == [True, True, False]


def test_an_error_while_acting_says_what_may_have_left():
    """Whoever reads it has to know that an answer may be wrong."""
    reason = leaked(RuntimeError("no scheduler"))
    assert reason.startswith("RuntimeError: no scheduler; tokens of this step may have been given out")
