"""The audit of continuous batching: every byte of its cache that a forward changes is one that our view names."""

import pytest
from tiny.batching import Traffic, serve
from tiny.models import batching

from canary_core.testing import Findings


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("samples", [1, 3])
def test_nothing_changes_that_no_view_names(kind, samples, guard):
    """Prefills in chunks, decodes, forks, windows: all forwards pass, and the outputs are what they are."""
    load = Traffic(samples=samples, requests=4, pages=16, batch_tokens=32)
    bare = serve(batching(kind), load)
    findings, guarded = Findings(), guard(batching(kind), mode="raise", audit=1000)
    guarded.register(findings)
    assert serve(batching(kind), load) == bare
    stats = guarded.stats()
    guarded.close()
    assert stats["audited_forwards"] == stats["forwards"] > 10
    assert stats["audit_unclaimed_bytes"] == 0
    (event,) = findings.told("audit")
    assert event.fields["changed_bytes"] == event.fields["claimed_bytes"] > 0
    (coverage,) = findings.told("coverage")
    assert (coverage.fields["denominator"], coverage.fields["coverage_ratio"]) == ("engine", 1)
    assert not findings.told("audit_skipped")
