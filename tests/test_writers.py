"""`Writers`: names of requests behind the small numbers in records."""

from canary_core.writers import Writers


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
