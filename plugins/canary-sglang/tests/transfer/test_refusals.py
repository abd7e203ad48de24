"""Pools whose KV comes by a way on which it could not be followed: refused, with what it is that comes."""

from types import SimpleNamespace

import pytest
from canary_sglang.transfer import disaggregation, hicache

from canary_core.region import RegionKind

pytestmark = [pytest.mark.without_engine, pytest.mark.older_release]


@pytest.mark.parametrize(
    ("regions", "refused"),
    [(["full"], None), (["full", "draft/swa"], None), (["full", "draft/c4"], "c4"), (["full", "mamba"], "mamba")],
    ids=["full", "window", "compressed", "states"],
)
def test_hicache_names_slots_of_tokens(regions, refused):
    """Of other slots that it moves nothing could be known."""
    reason = hicache.refusal(regions)
    assert reason is None if refused is None else refused in reason


@pytest.mark.parametrize(
    ("name", "kind", "refused"),
    [
        ("swa", RegionKind.WINDOW, False),
        ("draft/c4", RegionKind.COMPRESSED, False),
        ("mamba", RegionKind.STATE, True),
    ],
    ids=["window", "compressed", "states"],
)
def test_a_decode_engine_receives_slots_of_tokens(name, kind, refused):
    """Recurrent states that come from the prefill engine could not be followed."""
    regions = [SimpleNamespace(name="full", kind=RegionKind.FULL), SimpleNamespace(name=name, kind=kind)]
    reason = disaggregation.refusal(regions)
    assert name in reason if refused else reason is None
