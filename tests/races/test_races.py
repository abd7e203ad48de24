"""Nothing of Canary's that runs beside the engine touches memory that somebody else uses, unless an event says which of
them comes first. On a GPU a mistake there would be a false alarm, once in a while."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from races.accesses import Accesses
from races.served import Served
from races.streams import Device, Event

from canary_core import Overlap
from canary_core.runtime.event_queue import EventQueue

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="looks into Triton's interpreter, which runs kernels where there is no GPU"
)

FORWARDS = 16
"""Some requests end on the way, and what they had is used again."""


@pytest.mark.parametrize(("overlap", "scheduler"), [
    (Overlap.CHECK, True), (Overlap.ALL, False), (Overlap.NEXT, False), (Overlap.NEXT, True),
])  # fmt: skip
def test_no_two_launches_race(overlap, scheduler, monkeypatch):
    """Whatever runs beside what, also where a scheduler prepares the next batch on its own stream: traffic in which
    slots are handed out again at once, prefixes are hit and evicted, tables compared. Nothing is found, and all that
    was written is recorded."""
    served = Served(monkeypatch, overlap, scheduler)
    served.serve(FORWARDS)
    assert served.accesses.races == []
    assert served.told >= {"share", "park", "evict", "free"}
    assert ("copy" in served.told) == (not overlap.after_forward)
    assert served.accesses.kernels >= {"check_kernel", "fingerprint_kernel", "record_kernel", "scrub_kernel"}
    assert "fingerprint_record_kernel" in served.accesses.kernels
    served.canary.drain()
    assert served.guarded.violations == []
    stats = served.canary.stats()
    assert stats["recorded_slots"] == served.computed
    assert stats["checked_forwards"] == FORWARDS
    assert stats["tables_compared"] > 0


@pytest.mark.parametrize("overlap", [Overlap.CHECK, Overlap.ALL])
def test_nor_where_the_engine_calls_before_and_after(overlap, monkeypatch):
    """As vLLM's plugin does, with the forward first where that is allowed."""
    served = Served(monkeypatch, overlap)
    served.brackets = True
    served.serve(FORWARDS)
    assert served.accesses.races == []
    served.canary.drain()
    assert served.guarded.violations == []
    assert served.canary.stats()["recorded_slots"] == served.computed


@triton.jit
def words_kernel(p_words, step: tl.constexpr):
    """Each of three programs writes a word; with ``step`` 0 all write the same one."""
    tl.store(p_words + tl.program_id(0) * step, tl.program_id(0))


@pytest.mark.parametrize(("step", "told"), [
    (1, []),
    (0, ["a program of words_kernel writes words, which another writes"]),
    (2, ["words_kernel writes memory that nobody has given it"]),
])  # fmt: skip
def test_programs_that_race_or_write_elsewhere_are_told(step, told):
    """Programs run in no order on a GPU, whatever stream they are launched on."""
    accesses = Accesses(Device(), lambda launch, memory, places: np.zeros(len(places), dtype=bool))
    # Of eight words the kernel is given four.
    words = torch.from_numpy(np.zeros(8, dtype=np.int32)[:4])
    accesses.watch("words", words)
    with accesses.looking():
        words_kernel[(3,)](words, step)
    assert accesses.races == told


def test_a_record_that_the_next_forward_should_wait_for_is_told(monkeypatch):
    """Slots were given back since, and Canary does not look at that: the next forward writes to what the record has
    still to read."""
    monkeypatch.setattr(EventQueue, "frees_nothing", True)
    served = Served(monkeypatch, Overlap.NEXT)
    served.serve(FORWARDS)
    assert any("fingerprint_record_kernel" in race and "the pool's k.0" in race for race in served.accesses.races)


def test_a_join_that_waits_for_nothing_is_told(monkeypatch):
    """The engine fills the rows of its table while a check may still read them."""
    served = Served(monkeypatch, Overlap.ALL)
    monkeypatch.setattr(Event, "wait", lambda *args: None)
    served.serve(FORWARDS, until_race=True)
    assert any("the table" in race for race in served.accesses.races)


def test_an_engine_that_does_not_keep_its_promise_is_told(monkeypatch):
    """Under `Overlap.NEXT` it fills the lengths of the next batch into the tensors of this one."""
    served = Served(monkeypatch, Overlap.NEXT)
    served.refills = True
    served.serve(FORWARDS, until_race=True)
    assert any("the batch's prefix_lens" in race for race in served.accesses.races)


def test_memory_that_is_given_back_too_early_is_told(monkeypatch):
    """Nobody tells torch's allocator what the side stream still reads."""
    served = Served(monkeypatch, Overlap.NEXT)
    monkeypatch.setattr(served.side, "reads", lambda *tensors: None)
    served.serve(FORWARDS, until_race=True)
    assert any("whoever gets the memory" in race for race in served.accesses.races)


def test_a_scheduler_that_does_not_follow_the_check_is_told(monkeypatch):
    """It fills rows of the table on its own stream while the check still reads them."""
    served = Served(monkeypatch, Overlap.NEXT, scheduler=True)
    monkeypatch.setattr(served.canary.step, "follow_check", lambda: None)
    served.serve(FORWARDS, until_race=True)
    assert any("the table" in race for race in served.accesses.races)
