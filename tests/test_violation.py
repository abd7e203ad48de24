"""`Violation`: its sentence says what is known, and nothing else."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from support.guarded import Guarded

from canary_core import Kind, Phase, State, Violation


@pytest.mark.parametrize("kind", Kind)
def test_a_sentence_has_no_none_and_no_minus_one(kind):
    """Whatever of a finding is not known: it is left out, or a word stands for it. What every finding of a kind has
    (the slot; for a wrong position what is stored) is always known."""
    value = 12 if kind is Kind.TWO_WRITERS else -1
    for phase, state, position, token, request, stored, written, freed, freer in product(
        Phase, State, (None, 5), (None, 7), (None, "r"), (None, "w"), (None, 3), (None, 2), (None, "f")
    ):
        found = Violation(
            kind, "full", phase, step=9, slot=4, page=1, position=position, token=token, stored_state=state,
            stored_position=6, stored_token=8, stored_value=value, request=request, stored_request=stored,
            step_written=written, step_freed=freed, freed_by=freer, detail="it is free",
        )  # fmt: skip
        assert "None" not in found.explanation
        assert "-1" not in found.explanation
        assert found.explanation.endswith(".")
        assert "  " not in found.explanation


def freed_and_handed_out(guarded: Guarded, slot: torch.Tensor) -> None:
    """The allocator had it back, and gave it to somebody else."""
    guarded.canary.slots.free("full", slot)
    guarded.canary.slots.alloc("full", slot, guarded.engine.writers.id("next"))


def cleared(guarded: Guarded, slot: torch.Tensor) -> None:
    """A roll-back of what a request still has."""
    guarded.canary.slots.clear("full", slot)


def never_written(guarded: Guarded, slot: torch.Tensor) -> None:
    """The table names a slot that nobody was given."""
    guarded.engine.requests[0].slots[0] = 40


def handed_out(guarded: Guarded, slot: torch.Tensor) -> None:
    """The table names a slot that was handed out and not filled."""
    guarded.canary.slots.alloc("full", torch.tensor([40]), guarded.engine.writers.id("next"))
    never_written(guarded, slot)


@pytest.mark.parametrize(
    ("mechanism", "says", "writer"),
    [
        (freed_and_handed_out, "was handed out again since victim wrote it at step 1, and not written since", "victim"),
        (cleared, "holds nothing since it was cleared or rolled back; victim wrote it at step 1", "victim"),
        (never_written, "slot 40 (page 40), which no forward has written", None),
        (handed_out, "slot 40 (page 40), which was handed out and never written", None),
    ],
)
def test_unwritten_says_what_became_of_the_slot(
    guarded: Guarded, mechanism: Callable[..., None], says: str, writer: str | None
) -> None:
    """Who wrote it before is named where somebody did, and nobody where nobody did: not the first request of all."""
    victim = guarded.submit("victim")
    guarded.decode()
    mechanism(guarded, torch.tensor(victim.slots[:1]))
    guarded.decode()
    found = next(v for v in guarded.violations if v.kind is Kind.UNWRITTEN)
    assert says in found.explanation
    assert (found.stored_request, found.step_written) == (writer, 1 if writer else None)


def test_a_slot_that_was_handed_out_twice_unwritten_accuses_nobody(guarded):
    """Its record is that of the one who wrote it before, who has given it back."""
    before = guarded.submit("before")
    guarded.decode()
    slot = torch.tensor(before.slots[:1])
    guarded.canary.slots.free("full", slot)
    for name in ("one", "two"):
        guarded.canary.slots.alloc("full", slot, guarded.engine.writers.id(name))
    guarded.canary.drain()
    (found,) = guarded.violations
    assert (found.kind, found.request, found.stored_state) == (Kind.DOUBLE_ALLOC, "two", State.ALLOCATED)
    assert "handed out to two, but it was handed out before and neither freed nor written since" in found.explanation
    assert "before," not in found.explanation


def test_a_slot_listed_twice_in_one_call_is_said_to_be(guarded):
    """There is no earlier free that one could name."""
    guarded.submit()
    guarded.decode()
    guarded.canary.slots.alloc("full", torch.tensor([9]))
    guarded.canary.slots.free("full", torch.tensor([9, 9]))
    guarded.canary.drain()
    (found,) = guarded.violations
    assert found.explanation == (
        "slot 9 (page 9) was freed by the engine although it was free already: freed twice, or listed twice in one "
        "call."
    )


@pytest.mark.parametrize(("slot", "says"), [(999, "slot 999, which is no slot of the pool"), (0, "the null slot 0")])
def test_an_allocator_that_frees_what_it_never_had_is_told_as_that(guarded, slot, says):
    """Nobody reads anything there, and there is no position."""
    guarded.submit()
    guarded.decode()
    guarded.canary.slots.free("full", torch.tensor([slot]))
    guarded.canary.drain()
    (found,) = guarded.violations
    assert f"the engine took or gave back {says}" in found.explanation


def held_by_nobody(guarded: Guarded, slot: torch.Tensor, writer: str = "first") -> None:
    """Its last request let go of it, and the prefix cache keeps it."""
    guarded.canary.slots.park("full", slot, guarded.engine.writers.id(writer))


def released_again(guarded: Guarded, slot: torch.Tensor) -> None:
    """Two requests count themselves as the last."""
    held_by_nobody(guarded, slot)
    held_by_nobody(guarded, slot, "second")


def listed_twice(guarded: Guarded, slot: torch.Tensor) -> None:
    """One request that nobody can name lets go of the slot twice in one call."""
    guarded.canary.slots.park("full", torch.cat((slot, slot)))


def handed_out_before_eviction(guarded: Guarded, slot: torch.Tensor) -> None:
    """The allocator takes a block that the cache still has in its index."""
    held_by_nobody(guarded, slot)
    guarded.canary.slots.alloc("full", slot, guarded.engine.writers.id("next"))


def evicted_in_use(guarded: Guarded, slot: torch.Tensor) -> None:
    """Nobody let go of it."""
    guarded.canary.slots.evict("full", slot)


def evicted_before_it_was_written(guarded: Guarded, slot: torch.Tensor) -> None:
    """A request was given it, and is not to be named for what another one wrote there."""
    freed_and_handed_out(guarded, slot)
    guarded.canary.slots.evict("full", slot)


def hit_on_a_freed_slot(guarded: Guarded, slot: torch.Tensor) -> None:
    """The cache's index has a slot that the allocator has, too."""
    guarded.canary.slots.free("full", slot, guarded.engine.writers.id("first"))
    guarded.canary.slots.share("full", slot, guarded.engine.writers.id("next"))


@pytest.mark.parametrize(
    ("mechanism", "says"),
    [
        (
            released_again,
            "was released by second although no request has it: first let go of it at step 1, and the prefix cache "
            "keeps it since: released twice.",
        ),
        (
            handed_out_before_eviction,
            "was handed out to next while the prefix cache keeps it; victim wrote it at step 1: handed out before it "
            "was evicted.",
        ),
        (
            evicted_in_use,
            "was evicted from the prefix cache while a request has it: it was handed out or shared and not released "
            "since. victim wrote it at step 1. A lock was lost, or taken back too early.",
        ),
        (
            evicted_before_it_was_written,
            "was evicted from the prefix cache while a request has it: it was handed out and not released since. A "
            "lock was lost, or taken back too early.",
        ),
        (hit_on_a_freed_slot, "by the prefix cache, but first freed it at step 1: a prefix hit on a freed slot."),
    ],
)
def test_what_the_prefix_cache_did_wrong_is_said(guarded, mechanism, says):
    """Of a slot that victim wrote in the first step: who acts now, who acted before and when, and no more."""
    victim = guarded.submit("victim")
    guarded.decode()
    mechanism(guarded, torch.tensor(victim.slots[:1]))
    guarded.canary.drain()
    (found,) = guarded.violations
    assert found.explanation.endswith(says)


def test_a_slot_that_is_parked_twice_in_one_call_is_said_to_be(guarded):
    """There is no earlier release that one could name."""
    victim = guarded.submit("victim")
    guarded.decode()
    listed_twice(guarded, torch.tensor(victim.slots[:1]))
    guarded.canary.drain()
    (found,) = guarded.violations
    assert found.explanation.endswith(
        "was released by the engine although no request has it and the prefix cache keeps it: released twice, or "
        "listed twice in one call."
    )


def test_a_prefix_that_was_cached_before_it_was_filled_is_said_to_be(guarded):
    """What another request wrote there before is not what the cache should have."""
    before = guarded.submit("before")
    guarded.decode()
    slot = torch.tensor(before.slots[:1])
    freed_and_handed_out(guarded, slot)
    held_by_nobody(guarded, slot)
    guarded.decode()
    found = next(v for v in guarded.violations if v.kind is Kind.UNWRITTEN)
    assert "which the prefix cache keeps although nothing was written there since" in found.explanation


def test_a_parked_slot_that_was_never_written_accuses_no_writer(guarded):
    """It is handed out twice, and nobody has written it."""
    guarded.submit()
    guarded.decode()
    slot = torch.tensor([40])
    guarded.canary.slots.alloc("full", slot)
    handed_out_before_eviction(guarded, slot)
    guarded.canary.drain()
    (found,) = guarded.violations
    assert found.explanation.endswith("to next while the prefix cache keeps it: handed out before it was evicted.")
