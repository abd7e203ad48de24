"""A flipped exponent in the KV of running continuous batching: NaN spreads to whole batches, and NaN written over NaN
is no lost store."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from canary_transformers.demo import TransformersDemo
from tiny.batching import HAS_POOL

from canary_core import Canary, Kind, hookimpl
from canary_core.guard.reporting.budget import PROCESS
from canary_core.testing import Findings
from canary_kit.engines import Job, Traffic
from canary_kit.settings import default_config, strict_config

pytestmark = pytest.mark.skipif(not HAS_POOL, reason="Transformers 5.17 has no pool that could be followed")


@dataclass
class Exponent:
    """Sets the top bit of an exponent, in one number of a slot near the start of a request."""

    seed: int
    done: list[int] = field(default_factory=list)

    @hookimpl
    def canary_pre_forward(self, canary: Canary) -> None:
        """Before the fifth forward."""
        if self.done or canary.forwards < 4:
            return
        draw = random.Random(self.seed)
        state = next(iter(canary.states.values()))
        position, written = state.records[:, 1] // 32, state.records[:, 1] & 3 == 1
        slot = draw.choice(((position < 16) & written).nonzero()[:, 0].tolist())
        source = draw.choice(list(state.sources))
        first = slot // source.page_size * source.page_stride_bytes + slot % source.page_size * source.slot_stride_bytes
        bytes_ = torch.empty(0, dtype=torch.uint8).set_(source.tensor.untyped_storage())
        start = source.tensor.storage_offset() * source.tensor.element_size() + first
        bytes_[start + 4 * draw.randrange(source.chunk_bytes // 4) + 3] ^= 0x40
        self.done.append(slot)


@pytest.mark.parametrize(
    ("model", "seed", "settings"),
    [("llama", 8, strict_config), ("gemma3", 8, strict_config), ("llama", 8, default_config)],
)
def test_no_incident_says_that_a_store_was_lost(model, seed, settings, monkeypatch):
    """Hundreds of writes leave NaN where NaN was, of requests that never read the damage, too: all are findings of the
    incidents about wrong numbers."""
    heard, flip = Findings(), Exponent(seed)
    config = settings(incident_limit=0, read_interval=1)
    monkeypatch.setattr(PROCESS, "spend", lambda seconds: None)
    TransformersDemo().serve(Job(model, seed, Traffic.of(30, seed), config, (heard, flip), lambda: None))
    assert flip.done
    assert sum(v.kind is Kind.LOST_WRITE for v in heard.violations) > 50
    assert any(v.kind is Kind.BYTES for v in heard.violations)
    assert {incident.root.kind for incident in heard.incidents} <= {Kind.BYTES, Kind.NON_FINITE}
