"""Wrong plugins fail the conformance suite, with a message that points at what is wrong with them."""

from pathlib import Path

import pytest
from conformance.mutations import MUTATIONS, Mutation
from conformance.table import failure, row_start

PAGE = Path(__file__).parents[2] / "docs" / "plugin-mutations.md"
ROWS = {line.split(" | ")[0][2:]: line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()}


@pytest.mark.takes_turns("other wrong plugins")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_wrong_plugin_fails_as_documented(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that the docs name fails, by its own judgement and not by an exception, and blames the part with the
    bug."""
    assert mutation.name in ROWS, "write docs/plugin-mutations.md anew"
    # Some bugs show with the second engine only.
    outcome = failure(mutation, monkeypatch, ["test_uninstalling_restores_the_engine", ROWS[mutation.name][2]])
    assert outcome is not None, f"the suite passes a plugin in which {mutation.name}"
    assert outcome.error is None, outcome.error
    assert mutation.part in outcome.message.partition(":")[0], outcome.message
    assert row_start(mutation, outcome) in PAGE.read_text(encoding="utf-8"), outcome.message


def test_there_are_many() -> None:
    """At least 110, each by a name of its own, all of them in the page and no others."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) == len(rows) - 1 >= 110
