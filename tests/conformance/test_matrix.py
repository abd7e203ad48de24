"""docs/support-matrix.md is about the suite as it is."""

from pathlib import Path

from canary_toy.session import ToyConformance
from support.matrix import page

from canary_core.testing import run_suite, suite_tests

PAGE = (Path(__file__).parents[2] / "docs" / "support-matrix.md").read_text(encoding="utf-8")


def test_the_page_has_every_test_of_the_suite_and_nothing_fails():
    """A test that is new or renamed was run on every engine."""
    rows = [line for line in PAGE.partition("## Why")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(suite_tests(ToyConformance))
    assert "FAILS" not in PAGE
    assert "does not say why" not in PAGE


def test_a_row_says_what_became_of_a_test():
    """As the page was written: what the test asks, its ability, and a cell for each engine."""
    names = ["test_a_canary_guards_the_pool", "test_forks_are_silent"]
    outcomes = [outcome.fields() for outcome in run_suite(ToyConformance, names)]
    lacking = [
        {**outcome, "result": "undeclared", "message": "ability 'fork' is not declared: no forks here"}
        for outcome in outcomes
    ]
    made = page([{"engine": "one", "outcomes": outcomes}, {"engine": "two", "outcomes": lacking[1:]}]).splitlines()
    every, forks = [line for line in made if "| yes |" in line]
    assert every.endswith("| every plugin | yes |  |")
    assert forks.endswith("| `fork` | yes |  |")
    for line in (every, forks):
        assert line.rpartition("| yes |")[0] in PAGE
    assert made[-1] == "| two | `fork` | no forks here |"
