"""The conformance suite on continuous batching; ``canary check-plugin transformers`` runs the first of these."""

from canary_transformers import plugin
from canary_transformers.conformance import ContinuousConformance, WindowConformance


class TestContinuousBatching(ContinuousConformance):
    """Every test is inherited."""


class TestWindows(WindowConformance):
    """Every test is inherited."""


def test_the_plugin_offers_it():
    """``canary check-plugin`` finds the suite through the plugin's hook."""
    assert plugin.canary_conformance() is ContinuousConformance
