"""Chunked local attention, where a token attends to those of its own chunk only: Llama 4."""

from functools import cache

import pytest
from vllm_on_cpu import guarded

from canary_core import Kind

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]

CHUNK = 64
REGIONS = ("chunk", "chunk.1", "chunk.2", "full")


@cache
def engine():
    """So few blocks that requests are preempted."""
    from vllm_on_cpu.engine import SmallEngine

    return SmallEngine("llama4", num_gpu_blocks_override=26)


def test_clean_traffic_is_silent_and_answers_stay_the_same():
    """Prompts over several chunks, prefix hits whose first chunks are gone, blocks that are given back at the end of a
    chunk, preemption: no finding, every byte that forwards change is claimed, and all layers are guarded."""
    small = engine()
    small.renew()
    plain = guarded.traffic(small, 3)
    with guarded.guard(small, audit=16) as guard:
        assert guarded.traffic(small, 3) == plain
        assert guard.trouble() == []
        (audit,), (coverage,) = guard.findings.told("audit"), guard.findings.told("coverage")
        regions = guard.canary.regions
    assert tuple(regions) == REGIONS
    assert [region.chunked for region in regions.values()] == [True, True, True, False]
    assert coverage.fields["coverage_ratio"] == 1.0
    assert audit.fields["unclaimed_bytes"] == 0


@pytest.mark.parametrize(("layer", "half"), [(0, "k"), (2, "v")])
def test_a_flipped_bit_is_read_in_its_own_chunk_only(layer, half):
    """One in the present chunk is told with layer, half, position and request, one in the chunk before is not read."""
    small = engine()
    with guarded.guard(small) as guard:
        small.submit("alice", list(range(5, 5 + CHUNK + 20)), 12)
        while len(small.answers["alice"]) < 3:
            small.step()
        small.poke(layer, half, "alice", CHUNK + 3)
        while small.step():
            pass
        guard.canary.drain()
        found = guard.findings.violations
    assert {(v.kind, v.layer, v.half, v.stored_position, v.stored_request) for v in found} == {
        (Kind.BYTES, layer, half, CHUNK + 3, "alice")
    }


def test_blocks_given_back_within_a_chunk_are_found():
    """A manager that counts half a chunk too far gives back blocks that the next token still reads."""
    small = engine()
    with guarded.guard(small, read_check=0) as guard:
        small.submit("alice", list(range(5, 5 + CHUNK + 40)), 40)
        while len(small.answers["alice"]) < 3:
            small.step()
        assert guard.trouble() == []
        managers = small.scheduler.kv_cache_manager.coordinator.single_type_managers
        (manager, *_) = [m for m in managers if type(m).__name__ == "ChunkedLocalAttentionManager"]
        manager.get_num_skipped_tokens = lambda computed: (computed // CHUNK) * CHUNK + CHUNK // 2
        # The prefix cache keeps what was given back, until others need the blocks.
        for number in range(4):
            small.submit(f"other {number}", guarded.prompts(number)[0], 4)
        while small.step():
            pass
        guard.canary.drain()
        first = guard.findings.violations[0]
    assert first.kind in (Kind.FREED, Kind.UNWRITTEN, Kind.POSITION, Kind.TOKEN)
    assert (first.request, first.region) == ("alice", "chunk")
    assert first.position in range(CHUNK, CHUNK + CHUNK // 2)
