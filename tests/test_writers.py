"""`Writers`: names of requests behind the small numbers in records."""

from collections import deque

import pytest
import torch

from canary_core.runtime.identities import Identities
from canary_core.runtime.writers import Writers


def test_a_forgotten_request_gets_a_new_id_and_its_old_slots_keep_their_name() -> None:
    """A row that was reordered is another sequence, but who wrote what before is still told."""
    writers = Writers()
    old = writers.id("row 0")
    writers.forget("row 0")
    new = writers.id("row 0")
    assert new != old
    assert writers.name(old) == writers.name(new) == "row 0"


def test_names_of_forgotten_requests_do_not_pile_up() -> None:
    """Beam search forgets every row at every step."""
    writers = Writers(capacity=4)
    first = writers.id("row")
    for _ in range(10):
        writers.forget("row")
        writers.id("row")
    assert writers.name(first) is None
    assert sum(writers.name(i) is not None for i in range(11)) == 5


def test_forgetting_what_is_not_known_changes_nothing() -> None:
    """Twice, or never given."""
    writers = Writers()
    writers.forget("nobody")
    assert writers.id("a") == 0


def test_anchors_are_those_of_the_requests_as_they_are_now() -> None:
    """A name that is given to another request has that one's; the same rows are the same tensor, and those without an
    identity have the common one."""
    writers, device = Writers(capacity=3), torch.device("cpu")
    common = writers.identities.anchor()
    assert writers.anchors(["a", "b"], device).tolist() == [common, common]
    assert writers.anchors(["c", "d"], device) is writers.anchors(["a", "b"], device)
    writers.identify("a", lora="sql")
    both = writers.anchors(["a", "b"], device)
    assert both.tolist() == [writers.identities.anchor(lora="sql"), writers.identities.anchor()]
    assert writers.anchors(["a", "b"], device) is both
    assert writers.anchors(["b"], device).tolist() == [common]
    writers.identify("a", lora="law")
    again = writers.anchors(["a", "b"], device)
    assert again.tolist() == [writers.identities.anchor(lora="law"), writers.identities.anchor()]
    writers.forget("a")
    assert writers.anchor("a") == writers.identities.anchor()
    assert writers.anchors(["a", "b"], device).tolist() == [common, common]
    for number in range(5):
        writers.identify(str(number), cache_salt="x")
    assert [writers.anchor(str(n)) == writers.identities.anchor() for n in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_running_request_keeps_its_anchor_however_many_others_begin() -> None:
    """Only those that nobody has asked for since are let go of."""
    writers, device = Writers(capacity=4), torch.device("cpu")
    writers.identify("long", lora="sql")
    anchor = writers.anchor("long")
    for number in range(20):
        writers.identify(str(number), lora="law")
        rows = writers.anchors(["long", str(number)], device)
        assert rows is not None
        assert rows[0] == anchor


LONG = "x" * 1_000_000
FORGED = "a\n2026-01-01 [error] incident\x1b[2J\x00\x07\u202e\ud800"


def test_a_name_of_a_megabyte_is_kept_as_its_start_and_a_digest() -> None:
    """As a client may choose it: the request is known by it all the same, and another long name is another one."""
    writers = Writers()
    one, other = writers.id(LONG), writers.id(LONG + "y")
    assert one != other
    assert writers.id("x" * 1_000_000) == writers.known(LONG) == one
    name = writers.name(one)
    assert name is not None
    assert (name[:128], name[128], len(name)) == ("x" * 128, "#", 145)
    assert name == Writers.told(LONG) != writers.name(other)
    writers.identify(LONG, lora=LONG, cache_salt=LONG, extra_key=LONG)
    assert writers.anchor(LONG) != writers.anchor(LONG + "y")
    writers.forget(LONG)
    assert writers.id(LONG) != one
    assert _longest(vars(writers)) <= 256


def test_a_name_can_forge_no_line_and_no_other_name() -> None:
    """It is told in one printable line. A request that is called like that line is another one."""
    writers = Writers()
    one = writers.id(FORGED)
    told = writers.name(one)
    assert told is not None
    assert told.isprintable()
    assert told.startswith("a\\n2026-01-01 [error] incident\\x1b[2J\\x00\\x07\\u202e\\ud800#")
    assert writers.id(told) != one
    assert writers.id(FORGED) == one
    writers.identify("b", lora=FORGED)
    identity = writers.identities.name(writers.anchor("b"))
    assert identity is not None
    assert identity.isprintable()


@pytest.mark.parametrize("name", ["a", "cmpl-7f3c", "ünïcödé", "x" * 128, "with space"])
def test_an_ordinary_name_is_told_as_it_is(name: str) -> None:
    """Up to 128 printable characters."""
    writers = Writers()
    assert writers.name(writers.id(name)) == Writers.told(name) == name


def _longest(value: object) -> int:
    """Length of the longest text within."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return max((_longest(one) for pair in value.items() for one in pair), default=0)
    if isinstance(value, tuple | list | deque):
        return max(map(_longest, value), default=0)
    return _longest(vars(value)) if isinstance(value, Identities) else 0


def test_more_rows_than_ever_before_have_the_common_anchor() -> None:
    """The tensor grows; what was given out before stays as it was."""
    writers, device = Writers(), torch.device("cpu")
    few = writers.anchors(["a"] * 3, device)
    many = writers.anchors(["a"] * 5000, device)
    assert few.tolist() == [writers.identities.anchor()] * 3
    assert many.unique().tolist() == [writers.identities.anchor()]
    assert many.shape == (5000,)
