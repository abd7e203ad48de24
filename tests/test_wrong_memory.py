"""`reporting.wrong_memory` and `runtime.memory_proof`: an adapter that describes other memory than the engine's is told
as that, once; a bug of the engine is not."""

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import BatchView, Kind, KVSource, Region, SlotTable, Violation, ViolationError, hookimpl
from canary_core.guard.reporting.wrong_memory import FIRST_TOLD
from canary_core.runtime.memory_proof import AGREEING_FORWARDS, LOOKED_FORWARDS, Proof, decided, proof_of


class CopiedPool(ToyEngine):
    """Its adapter describes copies of the tensors of these names instead of the tensors."""

    def __init__(self, *names: str, **settings: int) -> None:
        self.names = names
        super().__init__(**settings)

    def region(self, name: str = "full") -> Region:
        """The same region with those sources elsewhere."""
        region = super().region(name)
        return replace(region, sources=tuple(map(self._copied, region.sources)))

    def _copied(self, source: KVSource) -> KVSource:
        return replace(source, tensor=source.tensor.clone()) if source.name in self.names else source


class LosingEngine(ToyEngine):
    """Its store to ``k`` of layer 1 does not run in these forwards, counted from 1, or not for these tokens."""

    def __init__(self, forwards: Collection[int], every: int = 1) -> None:
        super().__init__()
        self.forwards, self.every, self.count = forwards, every, 0

    def forward(self, batch: BatchView) -> None:
        """With some of it left out."""
        self.count += 1
        before = self.k[1].clone()
        super().forward(batch)
        if self.count in self.forwards:
            lost = batch.tables["full"].write_slots[:: self.every].long()
            self.k[1][lost] = before[lost]


def serve(guarded: Guarded, tokens: int = 12, decodes: int = 12) -> None:
    """A prompt in one forward, then so many decodes."""
    guarded.submit(tokens=tokens)
    guarded.step(chunk=tokens)
    for _ in range(decodes):
        guarded.decode()


def lost(guarded: Guarded) -> int:
    """Lost writes that the device has counted."""
    return int(guarded.canary.states["full"].shared.counters[Kind.LOST_WRITE])


def test_a_copied_pool_is_told_once_as_the_adapters_mistake():
    """The first findings are told, then one event with the counts; the rest is counted and none of it is gone."""
    guarded = Guarded(CopiedPool("k.0", "v.0", "k.1", "v.1"))
    serve(guarded)
    guarded.canary.drain()
    (event,) = guarded.findings.told("wrong_memory")
    assert event.level == "error"
    assert event.fields["region"] == "full"
    assert event.fields["sources"] == ["k.0", "v.0", "k.1", "v.1"]
    first = 12 + AGREEING_FORWARDS - 1
    assert event.fields["first_writes"] == event.fields["unchanged"] == 4 * first
    assert "region 'full' probably describes the wrong memory" in event.fields["reason"]
    assert "no copies" in event.fields["reason"]
    assert [v.kind for v in guarded.violations] == [Kind.LOST_WRITE] * FIRST_TOLD
    assert lost(guarded) == 4 * (12 + 12)
    stats = guarded.canary.stats()
    assert (stats["lost_write"], stats["withheld"]) == (FIRST_TOLD, lost(guarded) - FIRST_TOLD)
    assert guarded.canary.enabled


def test_one_wrong_layer_is_named_and_silences_nothing_else():
    """A flipped bit elsewhere, and a lost write of another source, are found as ever."""
    guarded = Guarded(CopiedPool("k.1"), read_check=-1)
    serve(guarded)
    (event,) = guarded.findings.told("wrong_memory")
    assert event.fields["sources"] == ["k.1"]
    assert "of 1 of 4 sources" in event.fields["reason"]
    told = len(guarded.violations)
    engine = guarded.engine
    engine.v[0][engine.requests[0].slots[2]] += 1
    guarded.decode()
    assert [(v.kind, v.source) for v in guarded.violations[told:]] == [(Kind.BYTES, "v.0")]


@pytest.mark.parametrize("window", [0, 8])
def test_other_regions_are_judged_by_their_own_writes(window):
    """The pool is copied, the window's is the engine's own."""
    guarded = Guarded(CopiedPool("k.0", "v.0", "k.1", "v.1", window=window))
    serve(guarded)
    (event,) = guarded.findings.told("wrong_memory")
    assert event.fields["region"] == "full"
    assert {v.region for v in guarded.violations} == {"full"}


def test_a_table_that_names_no_slots_is_told_as_the_adapters_mistake():
    """Numbers that are beyond the pool in every forward, as where pages are taken for slots."""
    guarded = Guarded()
    engine = guarded.engine
    guarded.submit(tokens=12)
    for chunk in [12] + [1] * 8:
        engine.requests[0].tokens.append(8)
        batch = engine.batch(chunk=chunk)
        table = batch.tables["full"]
        shifted = replace(table, entries=table.entries + 1000, write_slots=table.write_slots + 1000)
        guarded.canary.step.before(replace(batch, tables={"full": shifted}))
        engine.forward(batch)
        guarded.canary.step.after()
        guarded.canary.step.end()
    guarded.canary.drain()
    (event,) = guarded.findings.told("wrong_memory")
    assert event.fields["no_slots"] == event.fields["entries"]
    assert "page size" in event.fields["reason"]
    assert "sources" not in event.fields
    assert len(guarded.violations) == FIRST_TOLD
    assert {v.kind for v in guarded.violations} == {Kind.SLOT_RANGE}
    assert guarded.canary.stats()["withheld"] > FIRST_TOLD


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("forwards", [range(1, AGREEING_FORWARDS), range(2, 40), [1], range(1, 40, 2)])
def test_a_store_that_worked_once_is_the_engines_own(every, forwards):
    """A layer that loses all its writes in some forwards, or half of them in each: every finding is told."""
    guarded = Guarded(LosingEngine(forwards, every))
    serve(guarded)
    guarded.canary.drain()
    assert guarded.findings.told("wrong_memory") == []
    assert len(guarded.violations) == lost(guarded) > 0
    assert {v.source for v in guarded.violations} == {"k.1"}


def test_what_waits_is_told_when_the_engine_idles():
    """And it stays in doubt: a forward was too few to be sure."""
    guarded = Guarded(LosingEngine([1]))
    guarded.submit(tokens=12)
    guarded.step(chunk=12)
    assert len(guarded.violations) == FIRST_TOLD
    guarded.canary.step.end()
    assert len(guarded.violations) == lost(guarded) == 12
    guarded.decode()
    assert guarded.findings.told("wrong_memory") == []


def test_what_a_plugin_explains_is_no_wrong_memory():
    """Bytes that were there before Canary, say: every finding is dismissed, and nothing is told."""

    class Vet:
        @hookimpl
        def canary_dismiss(self, violation: Violation) -> str:
            return "the bytes were there before"

    guarded = Guarded(CopiedPool("k.1"), Vet())
    serve(guarded)
    assert guarded.findings.told("wrong_memory") == []
    assert guarded.canary.stats()["dismissed"] == lost(guarded) == 24


def test_in_raise_mode_the_first_finding_stops_the_engine_and_none_waits():
    """It is raised by the forward that brought it, and the event still says what it probably is."""
    guarded = Guarded(CopiedPool("k.1"), mode="raise")
    guarded.submit(tokens=12)
    with pytest.raises(ViolationError, match="lost_write"):
        guarded.step(chunk=12)
    assert len(guarded.violations) == 12
    for _ in range(AGREEING_FORWARDS):
        with pytest.raises(ViolationError):
            guarded.decode()
    assert len(guarded.violations) == lost(guarded)
    assert len(guarded.findings.told("wrong_memory")) == 1


def sound(guarded: Guarded) -> None:
    """Three requests that come and go."""
    for name in "abc":
        request = guarded.submit(name, tokens=10)
        for _ in range(LOOKED_FORWARDS):
            guarded.decode()
        guarded.engine.finish(request)


@pytest.mark.parametrize(
    "settings", [{}, {"bytes": "partial"}, {"bytes": "off"}, {"state_interval": 1}, {"read_check": -1}]
)
@pytest.mark.parametrize("make", [ToyEngine, lambda: ToyEngine(window=8), lambda: ToyEngine(row_elements=4)])
def test_a_sound_adapter_is_never_accused(make: Callable[[], ToyEngine], settings):
    """Whatever is fingerprinted, also slots of few bytes and windows; the first forwards prove the memory right."""
    guarded = Guarded(make(), **settings)
    sound(guarded)
    guarded.canary.drain()
    assert guarded.violations == []
    assert guarded.findings.told("wrong_memory") == []
    proof = guarded.canary._workspace.proof
    for region, rows in proof.rows.items():
        assert proof.over(region)
        found = decided(proof.tallies[rows].tolist(), over=False)
        assert found[0] is Proof.RIGHT
        assert set(found[1:]) <= {Proof.RIGHT, Proof.NONE}


def test_memory_that_was_never_written_before_is_asked_only_once():
    """A slot that is written again says nothing: its new token may have the old bytes."""
    guarded = Guarded()
    guarded.submit(tokens=6)
    guarded.step()
    tallies = guarded.canary._workspace.proof.tallies[1:]
    assert tallies[:, 2].tolist() == [6] * 4
    guarded.engine.requests[0].cached = 0
    guarded.engine.requests[0].slots, guarded.engine.free = [], guarded.engine.requests[0].slots + guarded.engine.free
    guarded.step()
    assert tallies[:, 2].tolist() == [6] * 4


@pytest.mark.parametrize(
    ("forwards", "failed", "proof"),
    [(0, 0, Proof.NONE), (3, 3, Proof.SUSPECT), (4, 4, Proof.WRONG), (9, 9, Proof.WRONG), (9, 8, Proof.RIGHT)],
)
def test_all_first_forwards_must_agree(forwards, failed, proof):
    """One that is as it should be settles it; few are no proof, and are none once no more are looked at."""
    assert proof_of(forwards, failed) is proof
    over = decided([[forwards, failed, 0, 0]], over=True)
    assert over == [Proof.RIGHT if proof is Proof.SUSPECT else proof]


@pytest.mark.gpu
def test_on_a_gpu_the_same_is_told():
    """Read late and by copies, never by a wait."""
    guarded = Guarded(CopiedPool("k.1", device="cuda"))
    serve(guarded, decodes=30)
    guarded.canary.drain()
    (event,) = guarded.findings.told("wrong_memory")
    assert event.fields["sources"] == ["k.1"]
    sound_one = Guarded(ToyEngine(device="cuda"))
    serve(sound_one, decodes=30)
    sound_one.canary.drain()
    assert (sound_one.violations, sound_one.findings.told("wrong_memory")) == ([], [])


def test_a_forward_of_padding_says_nothing():
    """Rows without a prefix and without new tokens are neither right nor wrong."""
    guarded = Guarded()
    none = torch.zeros(4, dtype=torch.int32)
    view = BatchView(none, none, none, none, {"full": SlotTable(guarded.engine.table)})
    guarded.canary.step.before(view)
    guarded.canary.step.after()
    guarded.canary.step.end()
    assert not guarded.canary._workspace.proof.tallies.any()


def test_forwards_are_looked_at_no_longer_than_until_the_memory_is_known_to_be_right():
    """The first reads of the host say so, long before the most forwards that are looked at; a copy stays in doubt."""
    right, wrong = Guarded(), Guarded(CopiedPool("k.0"))
    for guarded in (right, wrong):
        serve(guarded, decodes=4)
    assert not right.canary.slots.workspace.proof.looks
    assert wrong.canary.slots.workspace.proof.looks
    assert LOOKED_FORWARDS > 5
