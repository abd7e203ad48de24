"""Messages of the scheduler are replayed before the forward with whose batch they came."""

import pytest
import torch

from canary_adapters import BlockEvent, BlockGroup, BlockMessage, BlockReplay
from canary_core import BatchView, Canary, CanaryConfig, Kind, KVSource, Region, SlotTable, Writers


def guard(pool, **settings):
    """A Canary of 64 slots."""
    config = CanaryConfig(scrub_budget="0", silence_s=0.0, log_level="error", **settings)
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


def serve_two_blocks(canary, pool):
    """Blocks 1 and 2 are handed out, written, and parked in the prefix cache; returns their replay."""
    replay = BlockReplay(canary, [BlockGroup("full", 0, 16)], Writers().id)
    replay.replay(BlockMessage(0), list)
    replay.replay(BlockMessage(1, [BlockEvent("alloc", "first", [1, 2])]), list)
    slots = torch.arange(16, 48)
    view = BatchView(
        torch.tensor([0]),
        torch.tensor([32]),
        torch.arange(32),
        torch.tensor([0]),
        {"full": SlotTable(slots[None].int())},
    )
    canary.step.run(lambda: pool.index_copy_(0, slots, torch.rand(32, 4)), lambda: view)
    replay.replay(BlockMessage(2, [BlockEvent("park", "first", [1, 2])]), list)
    return replay


@pytest.mark.parametrize(("hit", "found"), [([1], []), ([2], [40]), ([1, 2], [40])])
def test_the_bytes_of_a_hit_are_compared_once(hit, found):
    """A slot of block 2 changed while it was parked: told by a hit on that block, before any forward."""
    pool = torch.zeros(64, 4)
    canary = guard(pool, hit_check=True)
    replay = serve_two_blocks(canary, pool)
    pool[40] += 1
    replay.replay(BlockMessage(3, [BlockEvent("share", "second", hit)]), list)
    canary.drain()
    assert [v.root.slot for v in canary.incidents] == found
    assert canary.stats()["hit_blocks"] == len(hit)
    canary.close()


def test_no_bytes_are_read_at_a_hit_by_default():
    """Nor anything else done."""
    pool = torch.zeros(64, 4)
    canary = guard(pool)
    replay = serve_two_blocks(canary, pool)
    pool[40] += 1
    before = canary.stats()
    replay.replay(BlockMessage(3, [BlockEvent("share", "second", [1, 2])]), list)
    canary.drain()
    assert canary.stats()["checked_bytes"] == before["checked_bytes"]
    assert "hit_blocks" not in canary.stats()
    canary.close()


def test_hits_that_nobody_can_see_are_told():
    """Blocks are not followed any more, or no bytes are known: the promise does not hold."""
    canary = guard(torch.zeros(64, 4), hit_check=True)
    replay = BlockReplay(canary, [BlockGroup("full", 0, 16)], Writers().id)
    replay.replay(BlockMessage(0, broken="it broke"), lambda: [[[1]]])
    without = guard(torch.zeros(64, 4), hit_check=True, bytes="off")
    BlockReplay(without, [BlockGroup("full", 0, 16)], Writers().id)
    told = [[e.fields["reason"] for _, e in c.recent_events if e.name == "hits_unchecked"] for c in (canary, without)]
    assert told == [["it broke"], ["CANARY_BYTES=off: no bytes are known"]]
    canary.close()
    without.close()
