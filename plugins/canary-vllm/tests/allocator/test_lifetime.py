"""Messages of the scheduler are replayed before the forward with whose batch they came."""

import pytest
import torch
from canary_vllm.allocator.lifetime import Lifetime
from canary_vllm.allocator.messages import Message
from canary_vllm.batches.requests import Requests
from canary_vllm.pools.pool import Group

from canary_adapters import BlockEvent
from canary_core import Canary, CanaryConfig, Kind, KVSource, Region, Writers

pytestmark = pytest.mark.without_engine


@pytest.mark.parametrize(("number", "kinds"), [(0, []), (1, [Kind.DOUBLE_ALLOC])])
def test_what_vllm_warms_up_with_is_nobodys(number, kinds):
    """Its warm-up writes blocks that no scheduler has handed out. They may be handed out by the scheduler's first
    output. Where others came before that, who has a block is known."""
    pool = torch.zeros(64, 4)
    config = CanaryConfig(scrub_budget="0", silence_s=0.0, log_level="error")
    canary = Canary([Region("full", 64, (KVSource(pool, "k", 0, 16, 16),), null_slot=0)], config)
    requests = Requests(Writers(), pool.device)
    canary.slots.alloc("full", torch.arange(16, 32), 1)
    lifetime = Lifetime(canary, [Group("full", 0, 16)], requests, judged=True)
    lifetime.replay(Message(number, [BlockEvent("alloc", "first", [1])]), list)
    canary.drain()
    assert {v.root.kind for v in canary.incidents} == set(kinds)
    canary.close()
