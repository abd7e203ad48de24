"""``CANARY_REPAIR``: a flipped word of KV that no request has is put back, where that is proven, and nowhere else."""

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine
from test_verdict import Acting
from torch import Tensor

from canary_core import Kind

ON = dict(repair=True, scrub_budget="1MiB")
"""Every scrub compares all of a toy pool."""


class Parked:
    """A toy engine whose request ``a`` has ended, with its KV in the prefix cache, while ``b`` goes on."""

    def __init__(self, *plugins: object, engine: ToyEngine | None = None, **settings: object) -> None:
        self.guarded = Guarded(engine, *plugins, **{**ON, **settings})
        self.engine, self.canary, self.findings = self.guarded.engine, self.guarded.canary, self.guarded.findings
        ended = self.guarded.submit("a", 12)
        self.guarded.submit("b", 20)
        self.guarded.step(12)
        self.slots = ended.slots
        self.engine.requests.remove(ended)
        self.event("park")
        self.guarded.step(1)
        self.before = [tensor.clone() for tensor in self.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """All KV of the first pool."""
        return [*self.engine.k, *self.engine.v]

    def event(self, name: str, slots: list[int] | None = None) -> None:
        """Tells an event of the parked slots."""
        getattr(self.canary.slots, name)("full", torch.tensor(slots or self.slots))

    def flip(self, tensor: Tensor, slot: int, word: int = 3, bits: int = 1 << 9) -> None:
        """Flips bits of a word, from outside."""
        tensor.view(torch.int32)[slot, word] ^= bits - (1 << 32) if bits >> 31 else bits

    def steps(self, count: int = 3) -> None:
        """Forwards of ``b`` alone."""
        for _ in range(count):
            self.guarded.decode()

    def changed(self) -> list[int]:
        """Parked slots that are not what they were."""
        pairs = list(zip(self.tensors, self.before, strict=True))
        return [s for s in self.slots if any(not torch.equal(now[s], then[s]) for now, then in pairs)]

    def told(self, name: str) -> list[dict[str, object]]:
        """Fields of the events of a name."""
        return [event.fields for event in self.findings.told(name)]

    @property
    def stats(self) -> dict[str, int]:
        """What became of repairs."""
        return {k: v for k, v in self.canary.stats().items() if k.startswith("repair")}


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Both back ends; Triton's on its interpreter."""
    name: str = request.param
    return name


def test_a_flipped_bit_in_parked_kv_is_put_back(backend):
    """Bit for bit, and told once; the finding and its incident are told as ever, and name it. A read of the slot finds
    nothing afterwards."""
    parked = Parked(backend=backend)
    slot = parked.slots[4]
    parked.flip(parked.engine.v[1], slot, word=7, bits=1 << 30)
    parked.steps()
    assert parked.changed() == []
    (event,) = parked.told("repaired")
    (finding,) = parked.guarded.violations
    assert (finding.kind, finding.slot, finding.source) == (Kind.BYTES, slot, "v.1")
    was = int(parked.before[3].view(torch.int32)[slot, 7]) & 0xFFFFFFFF
    assert (event["slot"], event["source"], event["word"], event["bits"]) == (slot, "v.1", 7, [30])
    assert (event["was"], event["damaged"]) == (f"{was:08x}", f"{was ^ 1 << 30:08x}")
    assert (event["stored_request"], event["stored_position"], event["incident"]) == ("a", 4, 1)
    (incident,) = parked.canary.incidents
    assert (incident.repaired, incident.fields()["repaired"]) == (1, 1)
    assert "put back: 1" in str(incident)
    assert parked.stats == {"repaired": 1}
    parked.event("share")
    parked.canary.slots.check("full", torch.tensor(parked.slots))
    parked.steps(2)
    parked.canary.drain()
    assert len(parked.guarded.violations) == 1


def test_nothing_is_written_by_default():
    """Nor with settings by which nothing could be repaired, which is said."""
    parked = Parked(repair=False)
    parked.flip(parked.engine.k[0], parked.slots[1])
    parked.steps()
    assert parked.changed() == [parked.slots[1]]
    assert parked.stats == {}
    for settings in (dict(on_violation="protect"), dict(bytes="off"), dict(scrub_budget="0"), dict(lifetime=False)):
        parked = Parked(**settings)
        (event,) = parked.told("repair_off")
        assert "off" in event["reason"] or "protect" in event["reason"]
        parked.flip(parked.engine.k[0], parked.slots[1])
        parked.steps()
        assert parked.changed() == [parked.slots[1]]


def test_two_words_are_left_alone():
    """As are a word of which many bits differ, and a whole row; each is tried once, and found as ever."""
    parked = Parked()
    k, (one, two, three) = parked.engine.k[0], parked.slots[:3]
    parked.flip(k, one, 3)
    parked.flip(k, one, 8)
    parked.flip(k, two, 5, 0x00F0_0F01)
    k[three] += 1
    parked.steps(4)
    assert parked.changed() == [one, two, three]
    assert {v.slot for v in parked.guarded.violations} == {one, two, three}
    assert parked.stats == {"repair_declined": 3}
    assert parked.told("repaired") == []


@pytest.mark.parametrize("bits", [0x0000_0001, 0x8000_0000, 0xFF00_0000, 0x0000_A500, 0x8001_0001])
def test_a_few_bits_of_one_word_are_put_back(bits):
    """Up to four, or those of one byte: an element of fp8."""
    parked = Parked()
    parked.flip(parked.engine.k[1], parked.slots[0], 0, bits)
    parked.steps()
    assert parked.changed() == []
    assert parked.stats == {"repaired": 1}


def test_two_sources_of_a_slot_are_two_words():
    """Each has a fingerprint of its own, and is put back by it."""
    parked = Parked()
    for tensor in parked.tensors:
        parked.flip(tensor, parked.slots[2])
    parked.steps()
    assert parked.changed() == []
    assert parked.stats == {"repaired": 4}


def test_kv_of_a_running_request_is_left_alone():
    """Also where a request has taken the slot since it was found: the event waits for the next forward."""
    parked = Parked()
    (running,) = parked.engine.requests
    parked.flip(parked.engine.k[0], running.slots[2])
    parked.steps()
    assert not torch.equal(parked.engine.k[0][running.slots[2]], parked.before[0][running.slots[2]])
    assert parked.stats == {}
    slot = parked.slots[3]
    parked.flip(parked.engine.k[0], slot)
    meanwhile(parked, lambda: parked.event("share", [slot]))
    parked.steps(1)
    assert parked.changed() == [slot]
    assert parked.stats == {"repair_declined": 1}
    # The request ends, and its KV is found again where nobody reads it.
    parked.event("park", [slot])
    parked.steps()
    assert parked.changed() == []
    assert len([v for v in parked.guarded.violations if v.slot == slot]) == 1


def meanwhile(parked: Parked, act) -> None:
    """``act`` happens between the next finding and its repair."""
    repairs = parked.canary._findings.repairs
    original = repairs.step

    def step() -> None:
        if repairs._waiting:
            repairs.step = original
            act()
        original()

    repairs.step = step


@pytest.mark.parametrize("what", ["free", "evict", "forget", "clear", "alloc", "copy"])
def test_a_slot_that_has_moved_on_is_untouched(backend, what):
    """Given up, handed out, or filled anew between the finding and its repair: not a byte is written."""
    parked = Parked(backend=backend)
    slot, other = parked.slots[5], parked.slots[6]
    parked.flip(parked.engine.k[0], slot)
    damaged = parked.engine.k[0][slot].clone()

    def act() -> None:
        if what == "alloc":
            parked.event("evict", [slot])
        if what == "copy":
            parked.canary.slots.copy("full", torch.tensor([other]), torch.tensor([slot]))
        else:
            parked.event(what, [slot])

    meanwhile(parked, act)
    parked.steps(1)
    assert torch.equal(parked.engine.k[0][slot], damaged)
    assert parked.told("repaired") == []
    assert parked.stats == {"repair_declined": 1}


def test_a_slot_that_was_written_again_is_untouched():
    """By a forward of the request that got it, and by somebody from outside who changes the word once more."""
    parked = Parked()
    slot, k = parked.slots[5], parked.engine.k[0]
    parked.flip(k, slot)
    meanwhile(parked, lambda: parked.flip(k, slot, 4))
    parked.steps(1)
    assert parked.stats == {"repair_declined": 1}
    assert parked.changed() == [slot]
    k[slot] = parked.before[0][slot]
    parked.flip(k, slot, 2)

    def rewritten() -> None:
        parked.event("evict", [slot])
        parked.event("alloc", [slot])
        parked.engine.free.insert(0, slot)
        parked.guarded.submit("c", 1)
        parked.guarded.step(1)

    meanwhile(parked, rewritten)
    parked.steps(2)
    (_, request) = parked.engine.requests
    assert slot in request.slots
    parked.canary.drain()
    assert parked.told("repaired") == []


def test_a_repair_that_does_not_prove_right_is_undone(backend, monkeypatch):
    """Another word changes after the old one was written, so the fingerprint differs: all is as it was found, with the
    other change; told as an error, and never tried again."""
    parked = Parked(backend=backend)
    slot, k = parked.slots[5], parked.engine.k[0]
    parked.flip(k, slot, 3)
    damaged = k[slot].clone()
    break_in(monkeypatch, backend, lambda: parked.flip(k, slot, 9))
    parked.steps(3)
    (event,) = parked.told("repair_failed")
    assert (event["slot"], event["word"]) == (slot, 3)
    parked.flip(k, slot, 9)
    assert torch.equal(k[slot], damaged)
    assert parked.stats["repair_failed"] == 1
    assert "repaired" not in parked.stats


def break_in(monkeypatch: pytest.MonkeyPatch, backend: str, act) -> None:
    """``act`` happens once, between the write and the proof."""
    from canary_core.ops.kernels import launch
    from canary_core.ops.torch import repair

    done = []

    def once() -> None:
        if not done:
            done.append(True)
            act()

    if backend == "torch":
        exchange = repair._exchange

        def exchanged(*args: object) -> bool:
            told = exchange(*args)
            once()
            return told

        monkeypatch.setattr(repair, "_exchange", exchanged)
        return
    call = launch.Launcher.__call__

    def called(self, *args: object) -> None:
        call(self, *args)
        if self.kernel.__name__ == "repair_kernel":
            once()

    monkeypatch.setattr(launch.Launcher, "__call__", called)


def test_a_bit_that_comes_back_is_told_again_and_not_put_back_again():
    """Memory that fails for good: the finding is a new one, and the second change stays as evidence."""
    parked = Parked()
    slot = parked.slots[5]
    for times in (1, 2):
        parked.flip(parked.engine.k[0], slot)
        parked.steps(4)
        assert len(parked.guarded.violations) == times
        assert parked.stats == {"repaired": 1}
    assert parked.changed() == [slot]
    # Another bit is another change.
    parked.engine.k[0][slot] = parked.before[0][slot]
    parked.flip(parked.engine.k[0], slot, 1)
    parked.steps(4)
    assert parked.changed() == []


@pytest.mark.parametrize("mode", ["abort", "quarantine"])
def test_who_acts_on_findings_is_called_only_where_nothing_was_repaired(mode):
    """A repaired slot is right again; any other is condemned in the same step."""
    acting = Acting()
    parked = Parked(acting, on_violation=mode)
    one, two = parked.slots[3:5]
    parked.flip(parked.engine.k[0], one)
    parked.steps(2)
    assert acting.verdicts == []
    parked.flip(parked.engine.k[0], two, 1)
    parked.flip(parked.engine.k[0], two, 2)
    parked.guarded.decode()
    assert parked.changed() == [two]
    assert {verdict.slot for verdict in acting.verdicts} == {two}


def test_a_slot_whose_repair_failed_is_condemned(monkeypatch):
    """As is one that a request took meanwhile."""
    acting = Acting()
    parked = Parked(acting, on_violation="quarantine")
    break_in(monkeypatch, "torch", lambda: parked.flip(parked.engine.k[0], parked.slots[5], 9))
    parked.flip(parked.engine.k[0], parked.slots[5], 3)
    parked.guarded.decode()
    assert {verdict.slot for verdict in acting.verdicts} == {parked.slots[5]}
    parked.flip(parked.engine.k[1], parked.slots[6])
    meanwhile(parked, lambda: parked.event("share", [parked.slots[6]]))
    parked.guarded.decode()
    assert {verdict.slot for verdict in acting.verdicts} == {parked.slots[5], parked.slots[6]}


def test_a_source_that_is_not_aligned_to_words_is_left_alone():
    """Its words can't be exchanged one by one: 94 bytes a row."""
    engine = ToyEngine(row_elements=47)
    acting = Acting()
    parked = Parked(acting, engine=engine, on_violation="quarantine")
    engine.k[0].view(torch.int16)[parked.slots[2], 20] ^= 1
    parked.steps()
    assert parked.stats == {"repair_declined": 1}
    assert {verdict.slot for verdict in acting.verdicts} == {parked.slots[2]}
    assert parked.changed() == [parked.slots[2]]


def test_what_one_launch_takes_is_bounded():
    """Of more findings at once the others are tried when they are found again: all are put back in the end."""
    parked = Parked(engine=ToyEngine(layers=4))
    for tensor in parked.tensors:
        for slot in parked.slots[:4]:
            parked.flip(tensor, slot)
    parked.steps(1)
    assert 0 < parked.stats["repaired"] < 32
    parked.steps(8)
    assert parked.changed() == []
    assert parked.stats == {"repaired": 32}
