"""The conformance suite on this plugin; ``canary check-plugin toy`` runs the same from a shell."""

from canary_toy.session import ToyConformance


class TestToy(ToyConformance):
    """Every test is inherited."""
