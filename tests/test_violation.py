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
    assert f"the engine freed or handed out {says}" in found.explanation
