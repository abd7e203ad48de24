"""`Step.weights_changed`: KV from before a change of the weights must not be hit by a request that begins after it.
What running requests go on with is the engine's policy, and never a finding."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.guarded import Guarded
from support.toy import Request, ToyEngine

from canary_core import Event, Kind
from canary_core.runtime.identities import CHANGES, Identities

START, FIRST = "the weights of the start", "the weights of change 1 (load_weights)"


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    """A toy engine under guard."""
    made = Guarded(ToyEngine(slots=256))
    yield made
    made.canary.close()


def step(guarded: Guarded) -> None:
    """A forward with the requests' own anchors."""
    engine, canary = guarded.engine, guarded.canary
    names = [request.name for request in engine.requests]
    for name in names:
        engine.writers.id(name)
    batch = replace(engine.batch(), anchors=engine.writers.anchors(names, canary.device))
    canary.step.before(batch)
    engine.forward(batch)
    canary.step.after(batch)
    canary.step.end()


def decode(guarded: Guarded, steps: int = 1) -> None:
    """A token more of each request."""
    for _ in range(steps):
        for request in guarded.engine.requests:
            request.tokens.append(8)
        step(guarded)


def ended(guarded: Guarded, request: Request) -> None:
    """The engine keeps what the request has cached."""
    guarded.engine.requests.remove(request)


def hit(guarded: Guarded, name: str, cached: Request, prefix: int) -> Request:
    """A request that begins with a prefix hit."""
    return guarded.engine.submit(name, [*cached.tokens[:prefix], 9], shared=cached, prefix=prefix)


def test_a_hit_on_what_older_weights_computed_is_one_finding_that_names_both(guarded: Guarded) -> None:
    """Tokens, positions and bytes are as they were written."""
    first = guarded.submit("first", 6)
    step(guarded)
    ended(guarded, first)
    guarded.canary.step.weights_changed("load_weights")
    hit(guarded, "second", first, 6)
    step(guarded)
    decode(guarded, 3)
    guarded.canary.drain()
    (found,) = guarded.violations
    assert (found.kind, found.position, found.request, found.stored_request) == (Kind.PREFIX, 0, "second", "first")
    assert (found.stored_identity, found.identity) == (START, FIRST)
    assert found.explanation == (
        f"second will read position 0 from slot {found.slot} (page {found.slot}), which first computed at step 1 with "
        f"{START}; second began with {FIRST}. A prefix hit across a change of the weights: the prefix cache was kept."
    )
    (incident,) = guarded.canary.incidents
    assert (incident.diagnoses[0].name, incident.diagnoses[0].sure) == ("foreign_prefix", "certain")
    assert guarded.canary.stats()["weights_changed"] == 1


def test_what_is_computed_anew_after_a_change_is_shared_silently(guarded: Guarded) -> None:
    """The engine has flushed its prefix cache."""
    first = guarded.submit("first", 6)
    step(guarded)
    for number in range(4):
        ended(guarded, first)
        guarded.canary.step.weights_changed("load_weights")
        first = guarded.submit(f"again {number}", 6)
        step(guarded)
        hit(guarded, f"hit {number}", first, 6)
        decode(guarded, 2)
        guarded.engine.requests[:] = [first]
    guarded.canary.drain()
    assert guarded.violations == []
    assert "carried" not in guarded.canary.stats()


def test_running_requests_go_on_silently(guarded: Guarded) -> None:
    """They read what older weights computed, and their own later tokens."""
    guarded.submit("running", 6)
    guarded.engine.submit("long", list(range(40, 60)))
    step(guarded)
    for _ in range(5):
        guarded.canary.step.weights_changed("load_weights")
        decode(guarded, 2)
    guarded.canary.drain()
    assert guarded.violations == []


def test_a_request_that_was_preempted_may_hit_older_or_newer_prefixes(guarded: Guarded) -> None:
    """It began before the change, so both are the engine's policy; each is judged as of what it holds from then on."""
    first, late = guarded.submit("first", 6), guarded.engine.submit("late", [*range(5, 11), 33])
    step(guarded)
    guarded.engine.requests.clear()
    guarded.canary.step.weights_changed("load_weights")
    newer = guarded.submit("newer", 6)
    step(guarded)
    guarded.engine.requests.clear()
    late.cached, late.slots = 6, list(newer.slots[:6])
    guarded.engine.requests.append(late)
    step(guarded)
    decode(guarded, 4)
    guarded.engine.writers.again("first")
    older = hit(guarded, "first", first, 5)
    step(guarded)
    decode(guarded, 4)
    guarded.canary.drain()
    assert older.name == "first"
    assert guarded.violations == []
    assert 0 < guarded.canary.stats()["carried"] <= 6


def test_what_a_preempted_request_computes_anew_may_be_shared(guarded: Guarded) -> None:
    """Whether or not anybody told that it was computed again: the step of its slots says that they are of now."""
    for name in ("untold", "told"):
        guarded.engine.requests.clear()
        first = guarded.submit(name, 6)
        step(guarded)
        guarded.canary.step.weights_changed("load_weights")
        if name == "told":
            guarded.engine.writers.again(name)
        guarded.engine.requests.clear()
        first = guarded.submit(name, 6)
        step(guarded)
        for number in range(3):
            hit(guarded, f"{name} {number}", first, 6)
            decode(guarded, 2)
    guarded.canary.drain()
    assert guarded.violations == []


def test_older_ones_are_found_however_often_weights_change(guarded: Guarded) -> None:
    """As in reinforcement learning: told once at 1, 2, 4, ... changes; bounded."""
    first = guarded.submit("first", 6)
    step(guarded)
    ended(guarded, first)
    for _ in range(CHANGES + 5):
        guarded.canary.step.weights_changed("load_weights")
    hit(guarded, "second", first, 6)
    step(guarded)
    decode(guarded, 2)
    guarded.canary.drain()
    (found,) = guarded.violations
    assert found.identity == f"the weights of change {CHANGES + 5} (load_weights)"
    told = [e for e in guarded.findings.events if isinstance(e, Event) and e.name == "weights_changed"]
    assert [e.fields["changes"] for e in told] == [2**n for n in range(11)]
    assert len(guarded.engine.writers.identities._changes) == CHANGES


def test_an_adapter_is_named_beside_the_weights(guarded: Guarded) -> None:
    """Where both differ, both are said; where the weights are the same, they are not."""
    known = Identities()
    old, other = known.anchor(lora="sql"), known.anchor(lora="law")
    assert known.tell(old, other) == ("LoRA adapter sql", "LoRA adapter law")
    known.change_weights("load_weights", 1)
    new = known.anchor(lora="sql")
    assert known.tell(new, other) == (f"{FIRST}, LoRA adapter sql", f"{START}, LoRA adapter law")
    assert known.tell(new, known.anchor(lora="law")) == ("LoRA adapter sql", "LoRA adapter law")
    assert not known.same_but_weights(new, other)
    assert known.same_but_weights(new, old)


def test_a_change_by_an_unknown_step_proves_nothing(guarded: Guarded) -> None:
    """What was written after the forward that is known to be before it may be of the new weights."""
    first = guarded.submit("first", 6)
    step(guarded)
    ended(guarded, first)
    guarded.canary.step.weights_changed("somebody", since=0)
    hit(guarded, "second", first, 6)
    step(guarded)
    decode(guarded, 2)
    guarded.canary.drain()
    assert guarded.violations == []
    assert guarded.canary.stats()["carried"] == 1


def test_nothing_is_done_where_canary_is_off() -> None:
    """As of any call."""
    guarded = Guarded(mode="off")
    guarded.canary.step.weights_changed("load_weights")
    assert guarded.canary.writers.identities.weights == 0
