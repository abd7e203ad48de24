"""Writes docs/plugin-mutations.md: what the conformance suite says of each wrong plugin.

PYTHONPATH=tests:examples/canary-toy/src python -m conformance.table > docs/plugin-mutations.md
"""

import sys
from collections.abc import Sequence

import pytest
from canary_toy import hooks
from canary_toy.session import ToyConformance
from canary_toy.toy_engine import Engine
from conformance.mutations import MUTATIONS, Mutation

from canary_core.testing import Outcome, run_suite, suite_tests

SHOWN = 300
"""Characters of a message that the table has."""

HEAD = """# What the conformance suite says of wrong plugins

Each row is one bug in the plugin of the [toy engine](../examples/canary-toy), made on purpose
([mutations](../tests/conformance/mutations)). The suite must fail for each, and say which part of the plugin is
wrong. CI holds every row. Written by `PYTHONPATH=tests:examples/canary-toy/src python -m conformance.table`.

| bug | where to look | test | what the suite said, shortened |
|---|---|---|---|
"""


SLOW = ("test_faults_are_found", "test_padding_is_not_taken_for_requests", "test_eviction_is_silent")
"""Come last."""


def failure(mutation: Mutation, patch: pytest.MonkeyPatch, tests: Sequence[str] = ()) -> Outcome | None:
    """What the suite, or ``tests`` of it, says first of the toy engine's plugin with this bug; None if it passes.
    Undoing ``patch`` takes back what a wrong plugin leaves behind, too."""
    patch.setattr(Engine, "__init__", Engine.__init__)
    patch.setattr(hooks, "HOOKS", hooks.ToyHooks())
    mutation.apply(patch)
    order = tests or sorted(suite_tests(ToyConformance), key=lambda test: test in SLOW)
    return next((outcome for outcome in run_suite(ToyConformance, order) if outcome.result == "failed"), None)


def row_start(mutation: Mutation, outcome: Outcome) -> str:
    """The part of a table row that is the same on every machine."""
    return f"| {mutation.name} | {outcome.message.partition(':')[0]} | {outcome.test} |"


def main() -> None:
    """Prints the page."""
    sys.stdout.write(HEAD)
    for mutation in MUTATIONS:
        with pytest.MonkeyPatch.context() as patch:
            outcome = failure(mutation, patch)
        if outcome is None:
            raise SystemExit(f"the suite passes a plugin in which {mutation.name}")
        said = outcome.message.partition(": ")[2].replace("|", "\\|")
        said = said if len(said) <= SHOWN else said[:SHOWN].rsplit(" ", 1)[0] + " ..."
        sys.stdout.write(f"{row_start(mutation, outcome)} {said} |\n")


if __name__ == "__main__":
    main()
