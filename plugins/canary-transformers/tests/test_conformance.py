"""The conformance suite on continuous batching; ``canary check-plugin transformers`` runs the first of these."""

import pytest
from canary_transformers import plugin
from canary_transformers.conformance import ContinuousConformance, WindowConformance
from canary_transformers.conformance.continuous import ContinuousSession
from tiny.instant import run_asynchronous_batches_on_cpu


class TestContinuousBatching(ContinuousConformance):
    """Every test is inherited."""


class TestWindows(WindowConformance):
    """Every test is inherited."""


class TestAsynchronousBatches(ContinuousConformance):
    """Batch N+1 is prepared before the tokens of batch N are known. The faults are those of the other classes."""

    abilities = ContinuousConformance.abilities & {"padding", "prefix_cache", "evict", "preempt", "raise"}
    lacking = (
        dict.fromkeys(ContinuousConformance.abilities - abilities, "tried with batches that are prepared one by one")
        | ContinuousConformance.lacking
    )
    test_faults_are_found = None

    @pytest.fixture(autouse=True)
    def engine_on_cpu(self, monkeypatch):
        """Only a GPU has streams."""
        run_asynchronous_batches_on_cpu(monkeypatch)

    def session(self):
        """A fresh manager with an empty cache."""
        return ContinuousSession(self.model, asynchronous=True)


def test_the_plugin_offers_it():
    """``canary check-plugin`` finds the suite through the plugin's hook."""
    assert plugin.canary_conformance() is ContinuousConformance
