"""Wrong plugins fail the conformance suite, with a message that points at what is wrong with them."""

import pytest
from canary_toy.session import ToyConformance
from conformance.mutations import MUTATIONS, Mutation

from canary_core.testing import Outcome, run_suite


def first_failure(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> Outcome | None:
    """What the suite says first of the toy engine's plugin with this bug."""
    mutation.apply(monkeypatch)
    return next((outcome for outcome in run_suite(ToyConformance) if outcome.result == "failed"), None)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_wrong_plugin_fails(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sentence that says which part of the plugin is wrong."""
    outcome = first_failure(mutation, monkeypatch)
    assert outcome is not None
    assert outcome.error is None, outcome.error
