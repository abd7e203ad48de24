"""`BlockLoads`: what a connector brings wrong is told with the step's output, also by a device behind the host."""

from threading import Thread

import pytest
from ledger.host_tier import PAGE, HostTier
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_adapters import BlockGroup, BlockLoad, BlockLoads, BlockVerdict
from canary_core import hookimpl
from canary_core.runtime.host_copy import HostCopy

PROMPT = list(range(5, 22))
GROUP = BlockGroup("full", 0, PAGE)
BEFORE, FIRST = 4 * PAGE, 80


class Engine:
    """An engine with a connector, whose stored block 2 is wrong. ``left``: blocks whose verdict it was handed."""

    def __init__(self, **settings):
        self.left = []
        guarded = Guarded(ToyEngine(slots=128), self, **{"on_violation": "protect", "read_check": 0, **settings})
        self.tier = HostTier(guarded)
        self.canary = guarded.canary
        self.tier.save(self.tier.compute(PROMPT))
        self.loads = BlockLoads(self.canary, [GROUP], self.tier.origin, guarded.engine.writers)

    @hookimpl
    def canary_verdict(self, verdict):
        """What nobody gates is acted on here."""
        found = BlockVerdict.of(verdict, [GROUP])
        if not self.loads.takes(found):
            self.left.append(found.block)

    def begin(self, name, waits=False, groups=1):
        """The scheduler names a load of four blocks, with the request's forward or before."""
        self.tier.g.engine.free = list(range(FIRST, 128))
        self.request, _ = self.tier.claim(PROMPT, name)
        blocks = [slot // PAGE for slot in self.request.slots[::PAGE]]
        load = BlockLoad(name, PROMPT[:BEFORE], 0, [blocks] * groups)
        self.loads.begin([], [] if waits else [(name, BEFORE)], [load])

    def come(self, wrong=(2,)):
        """The connector copies."""
        self.tier.copy(self.request, lambda block, source, data: -data if block in wrong else data)


BAD = FIRST // PAGE + 2


@pytest.fixture
def behind(monkeypatch):
    """Nothing arrives on the host, as on a busy GPU, until the test says so."""
    late = [True]
    monkeypatch.setattr(HostCopy, "arrived", lambda _: not late[0])
    return lambda: late.clear() or late.append(False)


@pytest.mark.parametrize("wrong", [(), (2,), (0, 1, 2, 3)])
def test_loads_beside_the_forward_are_told_with_its_output(wrong):
    """All that is wrong, and nothing else; nobody else hears of it, and what lies there is not known any more."""
    engine = Engine()
    engine.begin("a")
    engine.come(wrong)
    bad = {FIRST // PAGE + block for block in wrong}
    assert engine.loads.loaded({7}) == {7, *bad}
    assert engine.left == []
    assert engine.canary.stats().get("gated_blocks", 0) == len(wrong)
    assert len(engine.tier.g.violations) == len(wrong)
    assert engine.loads.loaded(None) == set()


def test_a_verdict_that_comes_before_the_output_leaves_joins_it(behind):
    """The set that the scheduler's process will get is the one that was given before."""
    engine = Engine()
    engine.begin("a")
    engine.come()
    told = engine.loads.loaded(())
    assert told == set()
    behind()
    engine.loads.late()
    assert (told, engine.left) == ({BAD}, [])


def test_a_verdict_that_comes_too_late_is_acted_on_as_others(behind):
    """The output has left: whoever acts on findings gets the block."""
    engine = Engine()
    engine.begin("a")
    engine.come()
    told = engine.loads.loaded(())
    engine.loads.late()
    behind()
    engine.canary.ledger.read()
    assert (told, engine.left) == (set(), [BAD])


def test_a_verdict_is_there_when_the_tokens_leave(behind):
    """Another thread has waited for them, and asks: what was brought beside their forward is told to whoever acts on
    findings, before the tokens leave. A second time there is nothing to tell."""
    engine = Engine()
    engine.begin("a")
    engine.come()
    engine.loads.loaded(())
    judged = engine.loads.late()
    behind()
    assert engine.left == []
    for _ in range(2):
        thread = Thread(target=judged)
        with engine.loads.lock:
            # This one issues the next step.
            thread.start()
            thread.join(0.2)
            assert thread.is_alive() == (engine.left == [])
        thread.join()
        assert engine.left == [BAD]


def test_a_load_that_has_ended_waits_for_its_verdict(behind):
    """Its request is not told to have its KV before the verdict is there, and then the block with it; another one whose
    load is right is not told as bad."""
    engine = Engine()
    engine.begin("a", waits=True)
    engine.come()
    names = engine.loads.finished({"a", "unknown"})
    assert engine.loads.loaded(()) == set()
    assert names == {"unknown"}
    assert engine.loads.holding
    assert engine.loads.finished(None) == set()
    behind()
    assert engine.loads.finished(()) == {"a"}
    assert engine.loads.loaded(()) == {BAD}
    assert not engine.loads.holding
    engine.begin("b", waits=True)
    engine.come(())
    names = engine.loads.finished({"b"})
    assert (engine.loads.loaded(()), names, engine.left) == (set(), {"b"}, [])


def test_no_request_waits_for_a_canary_that_is_off(behind):
    """An error of Canary's own must not keep a request from going on."""
    engine = Engine()
    engine.begin("a", waits=True)
    engine.come()
    engine.loads.finished({"a"})
    engine.loads.loaded(())
    engine.canary.fail("test", RuntimeError("an error"))
    assert engine.loads.finished(()) == {"a"}


def test_a_load_that_failed_in_part_is_not_judged_at_its_end():
    """Not even where the connector has said so some steps before: nobody knows what lies in the blocks."""
    for earlier in (True, False):
        engine = Engine()
        engine.begin("a", waits=True)
        if earlier:
            assert engine.loads.loaded({BAD}) == {BAD}
        names = engine.loads.finished({"a"})
        assert engine.loads.loaded(set() if earlier else {BAD}) == (set() if earlier else {BAD})
        assert (names, engine.tier.g.violations) == ({"a"}, [])
        # As much as counts comes with the request's forward.
        engine.come(())
        engine.loads.begin([], [("a", 2 * PAGE)], [])
        assert engine.tier.counts("matched", "differing") == [2, 0]


@pytest.mark.parametrize("settings", [{"on_violation": "report"}, {}], ids=["report", "several groups"])
def test_what_is_not_gated_is_told_as_ever(settings):
    """By default, and where the number of a block does not say whose it is."""
    engine = Engine(**settings)
    for waits in (False, True):
        engine.begin("a", waits, groups=1 if settings else 2)
        engine.come()
        names = engine.loads.finished({"a"})
        assert (engine.loads.loaded({7}), names) == ({7}, {"a"})
        # With protect whoever acts knows of a load beside the forward before the step's output leaves.
        assert len(engine.left) == (0 if settings else 1)
        if waits:
            engine.loads.begin([], [("a", BEFORE)], [])
        assert engine.tier.counts("differing") == [1 + waits]
        assert "gated_blocks" not in engine.canary.stats()
        assert len(engine.tier.g.violations) == 1
        assert len(engine.left) == (0 if settings else 1 + waits)
