"""The conformance suite on continuous batching; ``canary check-plugin transformers`` runs the first of these."""

from canary_transformers.conformance import ContinuousConformance


class TestContinuousBatching(ContinuousConformance):
    """Every test is inherited."""


class TestWindows(ContinuousConformance):
    """Sliding windows beside full attention: two regions take turns on one memory, and nothing is shared."""

    model = "gemma3"
    abilities = ContinuousConformance.abilities - {"prefix_cache", "park", "evict"}
