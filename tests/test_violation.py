"""`Violation`: its sentence says what is known, and nothing else."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.any_finding import FINDINGS
from support.guarded import Guarded

from canary_core import Kind, Phase, State, Violation


@settings(max_examples=1000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(FINDINGS)
def test_a_sentence_has_no_none_no_minus_one_and_no_number_for_a_name(found):
    """Whatever of a finding is not known: it is left out, or words stand for it. A name that is only a number says
    that it is a request's."""
    for sentence in (found.explanation, str(found)):
        text = re.sub(r"None of these|request -1\b|request (0|77)\b", "NAME", sentence)
        assert "None" not in text
        assert not re.search(r"-\d", text)
        assert "77" not in text
        assert not re.search(r"(^|[:,(] ?)\d+ (wrote|reads|writes|will|uses|expects|freed|should|lost)", text)
        assert not re.search(r"(by|to|since|for|but|although) \d+\b(?! of)", text)
        assert "{" not in text
        assert "  " not in text
        assert "''" not in text
        assert not re.search(r" [.,:;]|[.,:;]{2}", text)
        assert text.endswith(".")
    assert "step 0" not in str(found)


@pytest.mark.parametrize(
    ("given_fields", "says"),
    [
        (
            {"kind": Kind.SLOT_RANGE, "phase": Phase.EVENT, "slot": 999, "step": 0},
            "engine took or gave back slot 999",
        ),
        ({"kind": Kind.SLOT_RANGE, "slot": -1, "position": 82}, "reads position 82, for which the table has no entry"),
        (
            {"kind": Kind.SLOT_RANGE, "phase": Phase.POST_FORWARD, "slot": -1, "position": 82},
            "writes position 82, for which the batch has no slot: the adapter's write_slots or table are shorter",
        ),
        (
            {"kind": Kind.NULL_SLOT, "slot": -3, "position": 2},
            "uses a negative slot number for position 2",
        ),
        ({"kind": Kind.WRITE_INPUT, "position": 82, "stored_token": 3}, "who is at position 82"),
        (
            {
                "kind": Kind.WRITE_INPUT,
                "request": "a",
                "position": 82,
                "token": 9,
                "stored_token": 3,
                "stored_value": 9,
            },
            "the sampler gave a token 9 for position 82, but the forward computed token 3 there: the next tokens",
        ),
        (
            {
                "kind": Kind.TOKEN,
                "phase": Phase.POST_FORWARD,
                "request": "a",
                "position": 82,
                "token": 9,
                "slot": 4,
                "stored_token": 3,
                "stored_value": 9,
                "stored_request": "a",
                "step_written": 7,
            },
            "the sampler gave a token 9 for position 82, but slot 4, from which it was read, holds token 3 that a "
            "wrote at step 7: a rejected draft was kept",
        ),
        (
            {"kind": Kind.TOKEN, "phase": Phase.EVENT, "request": "a", "position": 9, "token": 3, "stored_token": 4},
            "the sampler gave a token 4 for position 9, but the request's own list has token 3 there",
        ),
        ({"kind": Kind.BYTES, "slot": 4}, "since a request whose name is not known wrote them"),
        ({"kind": Kind.BYTES, "slot": 4, "stored_request": "0"}, "since request 0 wrote them"),
        (
            {
                "kind": Kind.BYTES,
                "slot": 4,
                "source": "v.1",
                "phase": Phase.EVENT,
                "stored_request": "r6",
                "arrived": True,
            },
            "the bytes that were copied or loaded to slot 4 of v.1 are not those that r6 wrote",
        ),
        (
            {
                "kind": Kind.BYTES,
                "slot": 4,
                "source": "v.1",
                "layer": 1,
                "phase": Phase.POST_FORWARD,
                "position": 9,
                "request": "r6",
            },
            "the bytes of slot 4 of v.1 changed between the store of layer 1 and the end of the forward in which r6 "
            "wrote position 9 there:",
        ),
        (
            {"kind": Kind.FREED, "slot": 4, "position": 9, "request": "a", "region": "swa", "window": True},
            "a will read position 9 from slot 4 in the window pool swa, which was freed",
        ),
        (
            {"kind": Kind.NULL_SLOT, "slot": 0, "position": 9, "request": "a", "region": "swa", "window": True},
            "a uses the null slot 0 in the window pool swa for position 9:",
        ),
        (
            {"kind": Kind.NON_FINITE, "slot": 0, "source": "v.1", "phase": Phase.POST_FORWARD},
            "NaN or infinite values got into the null slot 0 of v.1, where padding is written:",
        ),
        ({"kind": Kind.UNWRITTEN, "slot": 4}, "a request whose name is not known will read a position from slot 4,"),
        (
            {"kind": Kind.DOUBLE_FREE, "slot": 4, "step_freed": 0, "freed_by": "a"},
            "a freed it before the first",
        ),
        (
            {"kind": Kind.ARRIVAL, "origin": "NixlConnector", "page": 3, "request": "a", "detail": "1 of 2 differs"},
            "not those that were stored for this prefix: NixlConnector brought page 3 for a, 1 of 2 differs.",
        ),
        (
            {"kind": Kind.ARRIVAL, "slot": 5, "phase": Phase.EVENT},
            "for this prefix: something brought slot 5 for the engine.",
        ),
        (
            {
                "kind": Kind.READ_TABLE,
                "slot": 5,
                "position": 2,
                "stored_value": 7,
                "request": "a",
                "detail": "kv_indices",
            },
            "kv_indices names slot 5 for position 2 of a, for which the engine keeps slot 7: attention was given a",
        ),
        (
            {"kind": Kind.READ_TABLE, "slot": -1, "position": 2, "stored_value": 7, "request": "a"},
            "a table of the attention backend names no slot for position 2 of a, for which the engine keeps slot 7",
        ),
        (
            {
                "kind": Kind.READ_TABLE,
                "slot": 5,
                "position": 2,
                "stored_value": 7,
                "request": "a",
                "detail": "pages",
                "stored_state": State.WRITTEN,
                "stored_position": 9,
                "stored_request": "b",
                "step_written": 4,
            },
            "keeps slot 7; b wrote position 9 to slot 5 at step 4. Attention was given a table that is stale",
        ),
        (
            {"kind": Kind.CACHE_STRUCTURE, "rule": "parent"},
            "cache is broken: it contradicts itself (parent).",
        ),
    ],
)
def test_what_is_not_known_has_words(given_fields, says):
    """For what a reader asks first: who, where, when."""
    fields = {"region": "full", "phase": Phase.PRE_FORWARD, "step": 3, **given_fields}
    assert says in Violation(**fields).explanation


def test_an_event_before_the_first_forward_has_no_step_0():
    """There is no such forward."""
    found = Violation(Kind.DOUBLE_FREE, "full", Phase.EVENT, step=0, slot=4)
    assert str(found).startswith("double_free in region full, before the first forward: slot 4 was freed by the engine")


@pytest.mark.parametrize("writer", [-1, 5])
def test_a_writer_that_nobody_named_is_no_number(guarded, writer):
    """A number that `Writers` never gave, as where an adapter numbers its requests itself."""
    request = guarded.submit()
    batch = guarded.engine.batch()
    batch = replace(batch, writers=torch.full_like(batch.writers, writer))
    guarded.canary.step.before(batch)
    guarded.engine.forward(batch)
    guarded.canary.step.after()
    guarded.canary.step.end()
    guarded.engine.k[0][request.slots[0]] += 1
    guarded.canary.slots.check("full", torch.tensor(request.slots))
    guarded.canary.drain()
    (found,) = guarded.violations
    assert (found.kind, found.stored_request) == (Kind.BYTES, None)
    assert "since a request whose name is not known wrote them at step 1" in found.explanation


def freed_and_handed_out(guarded: Guarded, slot: torch.Tensor) -> None:
    """The allocator had it back, and gave it to somebody else."""
    guarded.canary.slots.free("full", slot)
    guarded.canary.slots.alloc("full", slot, guarded.engine.writers.id("next"))


def use_after_free(guarded: Guarded, slot: torch.Tensor) -> None:
    """The allocator has it back, and the table still names it."""
    guarded.canary.slots.free("full", slot)


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
        (use_after_free, "was freed by the engine at step 1; victim wrote it at step 1: use after free", "victim"),
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
    found = next(v for v in guarded.violations if v.kind in (Kind.UNWRITTEN, Kind.FREED))
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
    assert "; before wrote it at step 1: a prefix was published" in found.explanation


@pytest.mark.parametrize("way", ["copy", "import"])
def test_bytes_that_came_by_a_copy_or_a_load_are_not_said_to_be_written_there(guarded, way):
    """Who wrote them wrote them elsewhere. What a forward writes there afterwards is its own again."""
    request = guarded.submit("a")
    guarded.decode()
    old, new = torch.tensor(request.slots[:2]), torch.tensor([40, 41])
    rows = guarded.canary.slots.export_records("full", old)
    for tensor in (*guarded.engine.k, *guarded.engine.v):
        tensor[new] = tensor[old]
    if way == "copy":
        guarded.canary.slots.copy("full", old, new)
    else:
        guarded.canary.slots.import_records("full", new, rows)
    guarded.engine.k[0][40] += 1
    guarded.canary.slots.check("full", new)
    request.slots[0] = 41
    guarded.decode()
    guarded.canary.drain()
    flipped, misread = guarded.violations
    assert (flipped.kind, flipped.slot, flipped.arrived) == (Kind.BYTES, 40, True)
    assert "copied or loaded to slot 40 (page 40) of k.0 are not those that a wrote at step 1" in flipped.explanation
    assert replace(flipped, phase=Phase.SCRUB).explanation.startswith(
        "the bytes of slot 40 (page 40) of k.0, which were copied or loaded there, are not those that its record tells "
        "of (a at step 1): a bad copy or transfer"
    )
    assert (misread.kind, misread.slot, misread.arrived) == (Kind.POSITION, 41, True)
    assert "what was copied or loaded there is position 1 of a: wrong slot mapping" in misread.explanation
    written = torch.tensor(request.slots[2:3])
    guarded.engine.k[0][written] += 1
    guarded.canary.slots.check("full", written)
    guarded.canary.drain()
    assert (guarded.violations[-1].kind, guarded.violations[-1].arrived) == (Kind.BYTES, None)
    assert "changed since a wrote them at step 1" in guarded.violations[-1].explanation


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
