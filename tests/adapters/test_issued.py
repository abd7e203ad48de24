"""Answers that leave when the device has done its work and the verdict is known, and what else stands between an engine
and Canary's exceptions."""

import pytest
import torch

from canary_adapters import MARK, Sheltered, judged_answer, mark
from canary_adapters.issued import Issued


class Later:
    """An engine's class of outputs that another thread waits for."""


def test_an_answer_without_tokens_is_judged_before_it_leaves(monkeypatch):
    """Whoever takes it waits for the device first, then the verdict is asked for; the answer is None, as without."""
    done = []
    monkeypatch.setattr(Issued, "wait", lambda self: done.append("waited"))
    answer = judged_answer(Later)(torch.device("cpu"), lambda: done.append("judged"))
    assert isinstance(answer, Later)
    assert done == []
    assert answer.get_output() is None
    assert done == ["waited", "judged"]
    assert judged_answer(Later) is judged_answer(Later)


@pytest.mark.gpu
def test_the_wait_is_for_what_was_issued_before():
    """From another thread, too; a CPU has always done it."""
    device = torch.device("cuda")
    made = torch.zeros(1, device=device)
    torch.cuda._sleep(100_000_000)
    made += 1
    kept = torch.empty(1, pin_memory=True)
    kept.copy_(made, non_blocking=True)
    issued = Issued(device)
    issued.wait()
    assert float(kept) == 1


def test_a_cpu_has_done_what_was_issued():
    """Nothing is waited for."""
    Issued(torch.device("cpu")).wait()


class Output:
    """Of an engine's runner."""

    def __init__(self, *names):
        self.req_ids = list(names)


def test_an_output_is_judged_where_it_has_tokens():
    """One without requests is shared by an engine's steps: it is neither marked nor judged, since nobody has waited for
    the device."""
    judged = []
    given, empty = Output("a"), Output()
    for output in (given, empty):
        mark(output, (0, True, 0, 1), made=lambda: judged.append(1))
    assert judged == [1]
    assert [hasattr(output, MARK) for output in (given, empty)] == [True, False]


def test_an_exception_is_told_and_does_not_leave():
    """One that ends the process does."""
    told = []
    shelter = Sheltered(lambda where, error: told.append((where, str(error))), "here")
    with shelter:
        raise ValueError("odd")
    assert told == [("here", "odd")]
    with pytest.raises(KeyboardInterrupt), shelter:
        raise KeyboardInterrupt
