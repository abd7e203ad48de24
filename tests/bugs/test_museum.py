"""How bugs are put into an engine, and what their outcome is held against. No engine is started here."""

import functools

import pytest

from bugs.museum import Found, Missed, patched, problem


def wrapped(function):
    """As Canary's hooks and SGLang's registry wrap a function."""

    @functools.wraps(function)
    def wrapper(*args):
        return ["told", *function(*args)]

    return wrapper


class Engine:
    """A class with a function that somebody has wrapped, and one that nobody has."""

    @wrapped
    def hooked(self):
        return ["right"]

    def plain(self):
        return ["right"]

    @staticmethod
    def static():
        return ["right"]


def wrong(usual, *args):
    """What takes a function's place."""
    return ["wrong", *usual(*args)]


@pytest.mark.parametrize(
    ("name", "broken"), [("hooked", ["told", "wrong", "right"]), ("plain", ["wrong", "right"]), ("static", None)]
)
def test_a_function_is_replaced_beneath_what_others_wrapped_around_it(name, broken):
    """Whoever listens to the engine hears what the broken function did; afterwards all is as it was."""
    before = getattr(Engine(), name)()
    with patched(Engine, name, wrong):
        assert getattr(Engine(), name)() == (broken or ["wrong", "right"])
    assert getattr(Engine(), name)() == before


def test_a_function_of_one_object_is_replaced_there_only():
    """Also where a hook shadows it on that object."""
    one, other, hooked = Engine(), Engine(), Engine()
    hooked.plain = wrapped(hooked.plain)
    with patched(one, "plain", wrong), patched(hooked, "plain", wrong):
        assert one.plain() == ["wrong", "right"]
        assert other.plain() == ["right"]
        assert hooked.plain() == ["told", "wrong", "right"]
    assert one.plain() == ["right"]
    assert hooked.plain() == ["told", "right"]


def outcome(**given):
    """Of a bug that struck before forward 4 and was found in it."""
    finding = {"kind": "freed", "step": 4, "sentence": "alice will read position 3 from slot 7: use after free"}
    return {"clean": [], "struck": 3, "found": [finding], "forwards": 9, "error": "", **given}


FOUND = Found("freed", 1, "alice will read position ... use after free")


@pytest.mark.parametrize(
    ("expected", "given", "said"),
    [
        (FOUND, {}, ""),
        (FOUND, {"found": []}, "nothing was found in 6 forwards"),
        (FOUND, {"struck": None}, "never ran"),
        (FOUND, {"struck": 2}, "otherwise than declared"),
        (FOUND, {"clean": [{"sentence": "a false alarm"}]}, "a false alarm"),
        (Found("bytes", 1, "alice"), {}, "otherwise than declared"),
        (Found("freed", 1, "bob will read"), {}, "otherwise than declared"),
        (Missed("why"), {"found": []}, ""),
        (Missed("why"), {"found": [], "struck": None}, "never ran"),
        (Missed("why"), {}, "now found: change its entry"),
    ],
)
def test_an_outcome_is_held_against_what_was_declared(expected, given, said):
    """Kind, sentence and forwards of the first finding; that the bug did something; silence before it and, for a bug
    that is missed, after it."""
    found = problem(expected, outcome(**given))
    assert bool(found) == bool(said)
    assert said in found
