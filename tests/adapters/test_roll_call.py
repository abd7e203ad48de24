"""`RollCall`: workers that are not guarded, or in another way than their scheduler's process says, are told."""

import pytest
import torch

from canary_adapters import RollCall, answer
from canary_core import AttachError, Canary, CanaryConfig, KVSource, Region

VERSION = "1.0"


class Called:
    """A roll call, and what it told."""

    def __init__(self, **settings):
        self.config = CanaryConfig.load(silence_s=0.0, log_level="error", **settings)
        self.told = []
        self.roll_call = RollCall(self.config, VERSION, replica=1, advice="look there", tell=self.told.append)

    def guarded(self, version=VERSION, **settings):
        """The word of a worker that is guarded."""
        region = Region("full", 8, (KVSource(torch.zeros(8, 4), "k", 0, 16, 16),))
        config = self.config.model_copy(update=settings)
        canary = Canary([region], config)
        try:
            return answer(config, version, canary)
        finally:
            canary.close()


def test_guarded_workers_are_silent():
    """All workers have a guard of the same release and settings; rank, folders and addresses may differ."""
    called = Called()
    words = [called.guarded(rank=rank, incident_dir=f"/somewhere/{rank}") for rank in (0, 1)]
    assert [word["enabled"] for word in words] == [True, True]
    called.roll_call.take(words, 2)
    # A worker without any KV has nothing to guard.
    called.roll_call.take([answer(called.config, VERSION, None)], 1)
    assert called.told == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (lambda called: called.guarded(version="0.9"), "runs canary 0.9, the scheduler's process 1.0"),
        (lambda called: called.guarded(read_check=7), "CANARY_READ_CHECK is '7', here '0'"),
        (lambda called: answer(called.config, VERSION, None, "it has another runner"), "it has another runner"),
        (lambda called: {"host": "b", "process": 7, "missing": "ImportError"}, "process 7 on b: ImportError"),
        (lambda _: None, "gave no answer"),
        (lambda _: {}, "gave no answer"),
    ],
)
def test_a_worker_that_is_not_guarded_alike_is_named(word, said):
    """Each sort of difference is one event with the rank, the reason and what to do."""
    called = Called()
    called.roll_call.take([called.guarded(), word(called)], 2)
    (event,) = called.told
    assert (event.name, event.level) == ("workers_unguarded", "error")
    assert event.fields["ranks"] == [1]
    assert event.fields["workers"] == 2
    assert event.fields["replica"] == 1
    assert said in event.fields["reason"]
    assert event.fields["reason"].endswith("look there")


def test_a_worker_that_is_missing_is_named():
    """Fewer answers than the engine has workers: those that did not answer."""
    called = Called()
    called.roll_call.take([called.guarded()], 3)
    (event,) = called.told
    assert event.fields["ranks"] == [1, 2]


def test_a_canary_that_is_off_is_named():
    """A worker whose Canary an error has switched off."""
    called = Called()
    region = Region("full", 8, (KVSource(torch.zeros(8, 4), "k", 0, 16, 16),))
    canary = Canary([region], called.config)
    canary.fail("here", RuntimeError("broken"))
    called.roll_call.take([answer(called.config, VERSION, canary)], 1)
    (event,) = called.told
    assert "switched its Canary off" in event.fields["reason"]


def test_raise_mode_stops_there():
    """In raise mode `AttachError` goes up into the engine, with the reason."""
    called = Called(mode="raise")
    with pytest.raises(AttachError, match="gave no answer"):
        called.roll_call.take([None], 1)


def test_outputs_with_marks_are_silent():
    """Each output says how many tokens its worker was given; a cache that is made anew counts from 0 again, and outputs
    without tokens have no mark."""
    called, computed = Called(), 100  # What the engine's warm-up was.
    for tokens in (5, 0, 7, 3):
        computed += tokens
        called.roll_call.output((0, True, 1, computed) if tokens else None, tokens)
    called.roll_call.output((0, True, 2, 9), 9)
    called.roll_call.output((0, True, 2, 10), 1)
    assert called.told == []


def test_outputs_without_marks_are_told_once():
    """Three in a row; one or two may be left from before."""
    called = Called()
    called.roll_call.output((0, True, 1, 5), 5)
    for _ in range(2):
        called.roll_call.output(None, 5)
    assert called.told == []
    for _ in range(5):
        called.roll_call.output(None, 5)
    (event,) = called.told
    assert "3 outputs came without the mark" in event.fields["reason"]


def test_outputs_that_pass_a_guard_by_are_told_once():
    """Its worker was given fewer tokens than were scheduled; then one whose Canary is off."""
    called = Called()
    called.roll_call.output((1, True, 1, 5), 5)
    for computed in (7, 7, 9):
        called.roll_call.output((1, True, 1, computed), 5)
    (event,) = called.told
    assert event.fields["ranks"] == [1]
    assert "2 tokens to compute where 5 were scheduled" in event.fields["reason"]
    called.roll_call.output((1, False, 1, 14), 5)
    called.roll_call.output((1, False, 1, 19), 5)
    assert "switched off" in called.told[1].fields["reason"]
    assert len(called.told) == 2
