"""Functions of an engine are wrapped, followed, and put back."""

import contextlib

import pytest

from canary_core import Patches


class Engine:
    """What is patched."""

    def forward(self, tokens, scale=1):
        """Something that an engine does."""
        return tokens * scale


class Child(Engine):
    """Inherits what is patched."""


def doubled(original):
    """A wrapper of `Engine.forward`."""
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


def test_wrapping_a_class_is_undone():
    """All objects of the class get the wrapper, and afterwards the very function that was there."""
    before, patches = vars(Engine)["forward"], Patches()
    patches.wrap(Engine, "forward", doubled)
    assert Engine().forward(3) == 6
    assert patches.done
    patches.undo()
    assert vars(Engine)["forward"] is before
    assert not patches.done


def test_wrapping_an_object_leaves_the_others_alone():
    """Only that object has a function of its own, and afterwards it has none."""
    engine, other, patches = Engine(), Engine(), Patches()
    patches.wrap(engine, "forward", doubled)
    assert (engine.forward(3), other.forward(3)) == (6, 3)
    patches.undo()
    assert "forward" not in vars(engine)


def test_wrapping_what_is_inherited_leaves_the_parent_alone():
    """The child gets an attribute of its own; undone, it inherits again."""
    patches = Patches()
    patches.wrap(Child, "forward", doubled)
    assert (Child().forward(3), Engine().forward(3)) == (6, 3)
    patches.undo()
    assert "forward" not in vars(Child)


def test_several_wrappers_are_undone_last_one_first():
    """Twice the same function: what was there first is there in the end."""
    engine, patches = Engine(), Patches()
    patches.wrap(engine, "forward", doubled)
    patches.wrap(engine, "forward", doubled)
    assert engine.forward(1) == 4
    patches.undo()
    assert engine.forward(1) == 1


def test_what_somebody_else_has_wrapped_since_is_left_alone():
    """Taking ours away from under theirs would take theirs away, too."""
    engine, ours, theirs = Engine(), Patches(), Patches()
    ours.wrap(engine, "forward", doubled)
    theirs.wrap(engine, "forward", doubled)
    ours.undo()
    assert engine.forward(1) == 4


def test_followers_are_told_the_result_and_the_arguments():
    """After the call, and its result is what the caller gets."""
    told, patches = [], Patches()
    patches.follow(Engine, "forward", lambda result, *args, **kwargs: told.append((result, args[1:], kwargs)))
    assert Engine().forward(3, scale=5) == 15
    patches.undo()
    Engine().forward(4)
    assert told == [(15, (3,), {"scale": 5})]


def test_an_unguarded_follower_raises_into_the_engine():
    """Without a guard an exception is the caller's."""
    engine = Engine()
    Patches().follow(engine, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.forward(3)


def test_the_guard_is_told_what_was_followed():
    """Where a callback fails, by a context of that call; what the guard lets pass is raised. Else it hears nothing."""
    engine, seen, fails = Engine(), [], []

    @contextlib.contextmanager
    def guard(where):
        seen.append(where)
        with contextlib.suppress(ValueError):
            yield

    def told(*_):
        if fails:
            raise fails[0]

    Patches(guard).follow(engine, "forward", told)
    engine.forward(3)
    assert seen == []
    fails.append(ValueError("swallowed"))
    assert engine.forward(3) == engine.forward(3) == 3
    fails[0] = KeyError("passes")
    with pytest.raises(KeyError):
        engine.forward(3)
    assert seen == ["after forward"] * 3


def test_a_guarded_follower_never_raises_into_the_engine(guarded):
    """With the guard of a Canary in log mode: Canary is off, loudly, and the engine goes on."""
    engine, canary = Engine(), guarded.canary
    Patches(canary.guard).follow(engine, "forward", lambda *_: 1 / 0)
    assert engine.forward(3) == 3
    assert not canary.enabled
    assert [e.fields["where"] for e in guarded.findings.told("disabled")] == ["after forward"]
