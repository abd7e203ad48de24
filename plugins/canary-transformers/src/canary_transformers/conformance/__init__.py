"""The conformance suite on continuous batching. Imports the engine."""

from canary_transformers.conformance.suite import ContinuousConformance, WindowConformance

__all__ = ["ContinuousConformance", "WindowConformance"]
