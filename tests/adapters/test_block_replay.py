"""Messages of the scheduler are replayed before the forward with whose batch they came."""

import pytest
import torch

from canary_adapters import BlockEvent, BlockGroup, BlockMessage, BlockReplay
from canary_core import Canary, CanaryConfig, Kind, KVSource, Region, Writers


def guard(pool):
    """A Canary of 64 slots."""
    config = CanaryConfig(scrub_budget="0", silence_s=0.0, log_level="error")
    return Canary([Region("full", 64, (KVSource(pool, "k", 0, 16, 16),), null_slot=0)], config)


@pytest.mark.parametrize(("number", "kinds"), [(0, []), (1, [Kind.DOUBLE_ALLOC])])
def test_what_an_engine_warms_up_with_is_nobodys(number, kinds):
    """Its warm-up writes blocks that no scheduler has handed out. They may be handed out by the scheduler's first
    output. Where others came before that, who has a block is known."""
    pool = torch.zeros(64, 4)
    canary = guard(pool)
    canary.slots.alloc("full", torch.arange(16, 32), 1)
    lifetime = BlockReplay(canary, [BlockGroup("full", 0, 16)], Writers().id, judged=True)
    lifetime.replay(BlockMessage(number, [BlockEvent("alloc", "first", [1])]), list)
    canary.drain()
    assert {v.root.kind for v in canary.incidents} == set(kinds)
    canary.close()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([BlockMessage(0), BlockMessage(2)], "message 2 of the scheduler came where 1 was due"),
        ([BlockMessage(0), None, None, None], "3 outputs of the scheduler came without word of its blocks"),
        ([None] * 64, "64 outputs of the scheduler came without word"),
        ([BlockMessage(0), BlockMessage(1, broken="it broke")], "it broke"),
        ([None, None, BlockMessage(0), None, None, BlockMessage(1)], None),
    ],
)
def test_messages_that_are_lost_are_told_once(messages, reason):
    """From then on no block counts as freed, and what a request is given anew counts as unknown."""
    canary = guard(torch.zeros(64, 4))
    replay = BlockReplay(canary, [BlockGroup("full", 0, 16)], Writers().id)
    for message in [*messages, None]:
        replay.replay(message, lambda: [[[1, 0, 2]]])
    told = [event.fields["reason"] for _, event in canary.recent_events if event.name == "lifetime_off"]
    assert [str(found)[: len(str(reason))] for found in told] == ([reason] if reason else [])
    canary.close()
