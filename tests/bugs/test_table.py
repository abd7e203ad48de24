"""The museum's own consistency. No engine is started here."""

from collections import Counter
from pathlib import Path

from bugs import museum, table
from bugs.classes import CLASSES, NOT_HERE

PAGE = Path(__file__).parents[2] / "docs" / "bugs.md"
BUGS = {(engine, name): museum.bug(engine, name) for engine in museum.ENGINES for name in museum.names(engine)}


def test_the_page_is_what_the_files_declare():
    """On failure: PYTHONPATH=src:tests python -m bugs.table > docs/bugs.md"""
    assert PAGE.read_text() == table.page()


def test_every_class_has_a_bug_or_a_reason():
    """Classes are those of `CLASSES`; each has an exhibit on some engine, or is named with the reason why not."""
    rows = {bug.row for bug in BUGS.values()}
    assert rows.isdisjoint(NOT_HERE)
    assert sorted(CLASSES) == sorted({*rows, *NOT_HERE})


def test_every_bug_says_what_it_resembles():
    """A title and a cause that no other bug has, and issues as repository#number."""
    assert max(Counter(bug.title for bug in BUGS.values()).values()) == 1
    assert max(Counter(bug.cause for bug in BUGS.values()).values()) == 1
    for bug in BUGS.values():
        assert bug.issues
        assert all(issue.partition("#")[2].isdigit() for issue in bug.issues), bug.issues


def test_there_are_many():
    """Ninety-five mechanisms at least, and fifteen live bugs."""
    assert len(BUGS) >= 95
    assert len(museum.names("live")) >= 15
