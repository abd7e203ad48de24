"""The self-test of ``canary doctor``: it finds what it breaks, and would say so if it did not."""

import torch

from canary_desk.doctor import checks, self_test


def test_every_fault_is_found_and_nothing_else():
    """On this device, within seconds."""
    outcomes = self_test.run(torch.device("cpu"))
    assert [(o.what, o.found) for o in outcomes if not o.passed] == []
    assert [o.expected for o in outcomes] == [None, "bytes", "bytes", "position", "lost_write"]
    assert max(o.seconds for o in outcomes) < self_test.LIMIT_S


def test_a_fault_that_is_not_found_is_bad(monkeypatch):
    """A fault that breaks nothing stands in for a check that sees nothing."""
    what, _, expected, settings = self_test.FAULTS[1]
    monkeypatch.setattr(self_test, "FAULTS", ((what, lambda pool: None, expected, settings),))
    (check,) = checks.tried(torch.device("cpu"))
    assert (check.verdict, check.text) == ("bad", "nothing found, bytes expected")


def test_a_false_alarm_is_bad(monkeypatch):
    """Where nothing was broken, nothing may be found."""
    what, _, _, settings = self_test.FAULTS[0]
    monkeypatch.setattr(self_test, "FAULTS", ((what, self_test.flip, None, settings),))
    (check,) = checks.tried(torch.device("cpu"))
    assert (check.verdict, check.text) == ("bad", "bytes found, nothing expected")


def test_an_error_of_canary_is_bad(monkeypatch):
    """And is told, not raised."""

    def fail(pool: self_test.ToyPool) -> None:
        pool.canary.fail("test", RuntimeError("no kernel image"))

    what, _, expected, settings = self_test.FAULTS[1]
    monkeypatch.setattr(self_test, "FAULTS", ((what, fail, expected, settings),))
    (check,) = checks.tried(torch.device("cpu"))
    assert check.verdict == "bad"
    assert "no kernel image" in check.text
