"""The bytes of a verified request against their fingerprints: the answer says what came of it, not the log alone."""

import pytest
import torch
from support.guarded import Guarded
from support.recomputed import ToyRecomputer
from support.toy import ToyEngine

from canary_core import Kind, Recompute

TOKENS = 64


class Verified:
    """A guarded toy engine with a request "a"; the noise is known."""

    def __init__(self, **settings: object) -> None:
        self.guarded = Guarded(ToyEngine(slots=512), read_check=0, scrub_budget="0", **settings)
        self.engine, self.canary = self.guarded.engine, self.guarded.canary
        self.recompute = Recompute(self.canary, ToyRecomputer(self.engine))

    def submit(self, name: str) -> None:
        """A request whose KV is in the cache."""
        self.guarded.submit(name, TOKENS)
        self.guarded.step(chunk=TOKENS)

    def taught(self) -> None:
        """The noise is known."""
        for turn in range(4):
            self.submit(f"fresh {turn}")
            self.recompute.now()
            self.engine.finish(self.engine.requests[0])
        assert self.recompute.noise.known

    def flip(self, position: int) -> None:
        """A bit of K of layer 1 of the first request."""
        slot = self.engine.requests[0].slots[position]
        self.engine.k[1][slot].view(torch.uint8)[..., :1] ^= 1

    def answer(self):
        """The verification of the only request."""
        (answer,) = self.recompute.now()
        assert type(answer).from_dict(answer.to_dict()) == answer
        return answer

    def told(self) -> list[tuple[Kind, int | None]]:
        """Findings so far, with their slots."""
        self.canary.drain()
        return [(found.kind, found.slot) for found in self.guarded.violations]


@pytest.fixture
def verified():
    """Makes one with these settings."""
    made = []

    def make(**settings: object) -> Verified:
        made.append(Verified(**settings))
        return made[-1]

    yield make
    for one in made:
        one.canary.close()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("known", [True, False])
def test_a_flipped_bit_is_no_same(known, backend, verified):
    """The numbers say nothing of one token, and less before the noise is known; the bytes do. The finding is told as it
    always was, and once only."""
    one = verified(backend=backend)
    if known:
        one.taught()
    one.submit("a")
    before = one.answer()
    assert (before.bytes.slots, before.bytes.changed, before.bytes.share) == (TOKENS, 0, 1.0)
    assert f"  bytes: {TOKENS} slots as written" in before.table().splitlines()
    assert before.verdict == "same"
    one.flip(50)
    answer = one.answer()
    assert (answer.verdict, answer.reason) == ("differs", None)
    found = answer.bytes
    assert (found.changed, found.region, found.source, found.position) == (1, "full", "k.1", 50)
    assert "bytes: 1 of 64 slots changed since they were written (full k.1, position 50)" in answer.table()
    assert "first in full k.1 at position 50" in answer.finding
    one.answer()
    assert one.told() == [(Kind.BYTES, one.engine.requests[0].slots[50])]
    assert one.canary.stats()["recompute_bytes_changed"] == 2


def test_nothing_is_learnt_from_changed_bytes(verified):
    """Their noise would be that of the damage."""
    one = verified()
    one.submit("a")
    one.flip(3)
    one.answer()
    assert one.recompute.noise.requests == 0


def test_without_fingerprints_nothing_is_said_to_be_as_written(verified):
    """Off, or of slots whose bytes came without records."""
    off = verified(bytes="off")
    off.submit("a")
    assert off.answer().bytes is None
    assert "  bytes: not compared" in off.answer().table().splitlines()
    one = verified()
    one.submit("a")
    slots = torch.tensor(one.engine.requests[0].slots)
    one.canary.slots.forget_bytes("full", slots[:16])
    assert one.answer().bytes.share == 0.75
    assert "64 slots as written, 0.75 of the bytes compared: the others have no fingerprints" in one.answer().table()
    one.canary.slots.forget_bytes("full", slots)
    assert "bytes: not compared, 64 slots have no fingerprints" in one.answer().table()


def test_many_changed_slots_are_counted_as_far_as_there_is_room(verified):
    """The ring of one look has as many rows as that of all."""
    one = verified(ring_rows=16)
    one.submit("a")
    one.engine.k[1][one.engine.requests[0].slots] *= 2
    found = one.answer().bytes
    assert found.at_least
    assert 1 <= found.changed <= 16
    assert found.sentence.startswith(f"at least {found.changed} of 64 slots changed")


def test_an_answer_of_an_earlier_release_has_no_bytes(verified):
    """Beside a newer command."""
    one = verified()
    one.submit("a")
    answer = one.answer()
    plain = answer.to_dict()
    del plain["bytes"]
    assert type(answer).from_dict(plain).bytes is None
