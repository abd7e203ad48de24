"""What continuous batching gives to attention, against the blocks that its cache keeps for each request."""

import pytest
from tiny.batching import HAS_POOL, Traffic, serve
from tiny.models import batching

from canary_core import Kind, Patches, hookimpl
from canary_core.testing import Findings

TIGHT = {"pages": 12, "batch_tokens": 24, "requests": 9, "new_tokens": 14}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_lists_of_every_group_are_compared_and_found_right(kind, guard):
    """Prefix sharing, forks, eviction, preemption and windows."""
    guarded, names = guard(batching(kind), table_interval=1, read_check=0), Names()
    guarded.register(names)
    serve(batching(kind), Traffic(**TIGHT, samples=2))
    stats = guarded.stats()
    assert guarded.violations == []
    assert stats["tables_compared"] == stats["forwards"] > 10
    assert stats["lengths_compared"] == stats["forwards"]
    assert "tables_skipped" not in stats
    given = ("read_index", "write_index", "cu_seq_lens_q", "cu_seq_lens_k")
    told = {f"{which} of {region}" for which in given for region in regions(kind)}
    assert names.told == told


@pytest.mark.skipif(not HAS_POOL, reason="up to 5.17 windows are not compared")
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_requests_that_have_not_filled_a_window_are_compared_too(kind, guard):
    """All requests of a forward have fewer blocks than a window has: the guard goes on, and finds nothing."""
    model, findings = batching(kind), Findings()
    guarded, names = guard(model, table_interval=1, read_check=0), Names()
    for plugin in (names, findings):
        guarded.register(plugin)
    load = Traffic(requests=2, new_tokens=14)
    assert len(model.generate_batch([[5, 6, 7], [9, 8]], **load.settings(model))) == 2
    stats = guarded.stats()
    assert [event.name for event in findings.events if event.level in ("warning", "error")] == []
    assert guarded.violations == []
    assert stats["tables_compared"] == stats["forwards"] >= 14
    assert {"read_index of sliding_attention", "write_index of sliding_attention"} <= names.told


class Names:
    """Which tables were compared."""

    def __init__(self):
        self.told = set()

    @hookimpl
    def canary_recorded(self, canary):
        self.told |= set(canary.step.tables.names)


def regions(kind):
    """Of one model; up to 5.17 windows are not compared."""
    all_of = {"llama": ["full"], "mistral": ["sliding"], "gemma3": ["full", "sliding"]}[kind]
    return [f"{name}_attention" for name in all_of if HAS_POOL or name == "full"]


@pytest.mark.skipif(not HAS_POOL, reason="up to 5.17 the lists are made by another class")
def test_lists_that_are_made_from_a_wrong_block_are_told(guard):
    """Read and write list agree with each other on a block that the request was never given: nothing else is wrong."""
    allocators = pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    model, hit = batching("llama"), {}
    guarded = guard(model, table_interval=1, read_check=0, lifetime=False)

    def wrong(original):
        def indices(self, request_id, past_length, query_length):
            blocks = self.block_table[request_id]
            if not hit and past_length > 8 and len(blocks) > 2:
                held = {block for table in self.block_table.values() for block in table}
                free = [block for block in range(min(held), max(held)) if block not in held]
                if free:
                    hit.update(request=request_id, right=blocks[-1], place=len(blocks) - 1, wrong=free[0])
            if request_id != hit.get("request"):
                return original(self, request_id, past_length, query_length)
            self.block_table[request_id] = [hit["wrong"] if block == hit["right"] else block for block in blocks]
            try:
                return original(self, request_id, past_length, query_length)
            finally:
                self.block_table[request_id] = blocks

        return indices

    patches = Patches()
    for name in ("get_read_indices", "get_write_indices"):
        patches.wrap(allocators.FullAttentionCacheAllocator, name, wrong)
    try:
        serve(model, Traffic(new_tokens=14, pages=80))
    finally:
        patches.undo()
    found = [v for v in guarded.violations if v.kind is Kind.READ_TABLE]
    assert found
    assert {v.request for v in found} == {hit["request"]}
    assert {v.detail for v in found} <= {"read_index of full_attention", "write_index of full_attention"}
    assert all(v.slot - hit["wrong"] * 8 == v.stored_value - hit["right"] * 8 == v.position % 8 for v in found)


@pytest.mark.skipif(not HAS_POOL, reason="up to 5.17 windows are not compared")
def test_a_stale_entry_of_a_window_s_list_is_told(guard):
    """A ring's read list with one slot of the page before."""
    allocators = pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    model, hit = batching("mistral"), {}
    guarded = guard(model, table_interval=1, read_check=0, lifetime=False)

    def stale(original):
        def get_read_indices(self, request_id, past_length, query_length):
            found = original(self, request_id, past_length, query_length)
            if past_length > 4 and request_id == hit.setdefault("request", request_id):
                found[2] = found[3]
            return found

        return get_read_indices

    patches = Patches()
    patches.wrap(allocators.SlidingAttentionCacheAllocator, "get_read_indices", stale)
    try:
        serve(model, Traffic(new_tokens=14))
    finally:
        patches.undo()
    found = [v for v in guarded.violations if v.kind is Kind.READ_TABLE]
    assert found
    assert {(v.request, v.detail) for v in found} == {(hit["request"], "read_index of sliding_attention")}


@pytest.mark.skipif(not HAS_POOL, reason="up to 5.17 lengths are made by another class")
@pytest.mark.parametrize(
    ("kind", "class_", "region"),
    [
        ("llama", "FullAttentionCacheAllocator", "full_attention"),
        ("mistral", "SlidingAttentionCacheAllocator", "sliding_attention"),
    ],
)
def test_a_later_chunk_without_its_context_is_told(kind, class_, region, guard):
    """Keys are cut out by the length of a first chunk; lists, blocks and tokens are right. The mask of SDPA, made from
    the same lengths, does not fit then, which ends the requests right after."""
    allocators = pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    model, hit = batching(kind), []
    guarded = guard(model, table_interval=1, read_check=0, lifetime=False)

    def wrong(original):
        def get_seqlen_k(self, past_length, query_length):
            if past_length and query_length > 1 and not hit:
                hit.append(past_length)
                return original(self, 0, query_length)
            return original(self, past_length, query_length)

        return get_seqlen_k

    patches = Patches()
    patches.wrap(getattr(allocators, class_), "get_seqlen_k", wrong)
    try:
        with pytest.raises(RuntimeError, match="must match the size"):
            serve(model, Traffic(new_tokens=14, batch_tokens=24))
    finally:
        patches.undo()
    first = guarded.violations[0]
    assert (first.kind, first.detail) == (Kind.READ_LENGTH, f"cu_seq_lens_k of {region}")
    assert 0 < first.stored_value - first.found_value <= hit[0]
