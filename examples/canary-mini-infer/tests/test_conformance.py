"""The conformance suite on this plugin; ``canary check-plugin mini_infer`` runs the first from a shell."""

import pytest

pytest.importorskip("mini_infer", reason="mini-infer is not installed, or this Python is older than 3.11")

from canary_mini_infer.session import MendedConformance, MiniConformance

OF_A_PREFIX_CACHE = (
    "test_prefix_hits_are_silent",
    "test_slots_released_twice_are_found",
    "test_slots_handed_out_before_eviction_are_found",
    "test_eviction_is_silent",
    "test_names_may_come_again",
    "test_preemption_is_silent",
)


class TestMiniInfer(MiniConformance):
    """Every test is inherited."""


@pytest.mark.parametrize("name", OF_A_PREFIX_CACHE)
def test_with_a_prefix_cache_that_works(name):
    """The plugin follows hits, releases and evictions, too. All other tests of the suite pass as well
    (``canary check-plugin`` of `MendedConformance`); they are those of `TestMiniInfer`."""
    getattr(MendedConformance(), name)()
