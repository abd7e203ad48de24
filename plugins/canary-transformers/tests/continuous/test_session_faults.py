"""A fault in the running engine: found, as the right kind, in the right place.

Faults in bytes are done from inside the model's forward, through the engine's own views of its cache. Faults in tables
are done to the tensors the forward gets, before Canary looks, and undone after it where the engine would crash.
"""

from contextlib import contextmanager

import pytest
import torch
from tiny.batching import HAS_POOL, AtStep, Traffic, serve
from tiny.models import batching

from canary_core import Kind, State


@contextmanager
def in_forward(model, act):
    """Calls ``act(arguments)`` in each paged forward of ``model``, until it returns True."""
    done = []

    def hook(module, args, kwargs):
        if not done and "cache" in kwargs and act(kwargs):
            done.append(True)

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield done
    finally:
        handle.remove()


def views(cache, layer):
    """The engine's K and V of a layer, by the numbers in its tables."""
    if hasattr(cache, "cache_allocators"):
        return cache.layer_to_allocator[layer]._kv_token_views[layer]
    place = cache.layer_index_to_group_indices[layer][1]
    return cache.key_cache[place], cache.value_cache[place]


def group_of(cache, layer):
    """Which of the engine's lists the layer reads, and the allocator that fills it."""
    if hasattr(cache, "cache_allocators"):
        allocator = cache.layer_to_allocator[layer]
        return allocator.index, allocator
    group = cache.layer_index_to_group_indices[layer][0]
    return group, cache.group_cache_managers[group]


def slot_of(entry, table):
    """Compact slot of a number in the engine's tables."""
    rows, slots = table.pool_page or (1, 1)
    return entry // rows * slots + entry % rows


def readable(batch, region):
    """(flat list, [(position, element)]) of what the forward's first row that reads anything reads."""
    table = batch.tables[region.name]
    flat = table.entries.as_strided((table.entries.numel(),), (1,))
    for row, past in enumerate(batch.prefix_lens.tolist()):
        first = max(0, past - (region.window_tokens - 1)) if region.window_tokens else 0
        places = [(p, int(table.rows[row]) + p) for p in range(first, past)]
        if len(places) > 6:
            return flat, places
    return flat, []


CASES = [("llama", 0), ("llama", 3), ("mistral", 2), ("gemma3", 1), ("gemma3", 3)]


@pytest.mark.parametrize("half", ["k", "v"])
@pytest.mark.parametrize(("kind", "layer"), CASES)
def test_a_flipped_bit_in_use_is_found(kind, layer, half, guard):
    """In a slot that requests read: in the step after, with layer, half and slot."""
    model, guarded, hit = batching(kind), guard(batching(kind), scrub_budget="0"), {}

    def act(arguments):
        index, allocator = group_of(arguments["cache"], layer)
        reads = arguments["read_index"][index]
        # The row's oldest slot is still read in the next step, except in a full window.
        entries = [e for e in reads.tolist()[2:] if e != getattr(allocator, "sentinel_index", -1)]
        if guarded.stats()["forwards"] < 5 or len(entries) < 8:
            return False
        entry = entries[3]
        if entry in arguments["write_index"][index].tolist():
            return False
        views(arguments["cache"], layer)["kv".index(half)][entry].view(torch.uint8).view(-1)[5] ^= 4
        hit.update(entry=entry, step=guarded.stats()["forwards"])
        return True

    with in_forward(model, act) as done:
        serve(model, Traffic(new_tokens=14))
    assert done
    found = guarded.violations[0]
    assert (found.kind, found.layer, found.half) == (Kind.BYTES, layer, half)
    assert found.step <= hit["step"] + 2
    assert {v.kind for v in guarded.violations} == {Kind.BYTES}
    assert {v.slot for v in guarded.violations} == {found.slot}


def test_a_flipped_bit_in_an_idle_cached_block_is_found_by_the_scrub(guard):
    """In a block that no running request reads, kept for prefix sharing."""
    model, guarded = batching("llama"), guard(batching("llama"), read_check=0, scrub_budget="1MiB")

    def act(arguments):
        cache = arguments["cache"]
        _, allocator = group_of(cache, 2)
        if hasattr(allocator, "ledger"):
            cached, stride = allocator.ledger.cached_blocks, allocator.block_physical_stride
        else:
            cached, stride = cache._block_manager._init_block_ids, cache.block_size
        if not cached:
            return False
        views(cache, 2)[1][next(iter(cached)) * stride + 3].view(torch.uint8).view(-1)[0] ^= 128
        return True

    with in_forward(model, act) as done:
        serve(model, Traffic(new_tokens=20, requests=12, batch_tokens=24))
    assert done
    assert [(v.kind, v.layer, v.half) for v in guarded.violations[:1]] == [(Kind.BYTES, 2, "v")]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        ("swap", {Kind.POSITION}),
        ("stale", {Kind.NULL_SLOT, Kind.UNWRITTEN, Kind.FREED, Kind.POSITION, Kind.TOKEN}),
        ("beyond", {Kind.SLOT_RANGE}),
        ("negative", {Kind.SLOT_RANGE, Kind.NULL_SLOT}),
        ("null", {Kind.NULL_SLOT}),
    ],
)
def test_an_edited_table_is_found(edit, kinds, kind, guard):
    """The list of slots on the device, changed after the engine wrote it: found in the same step."""
    model, guarded, hit = batching(kind), guard(batching(kind)), {}

    def act(canary, batch):
        region = next(iter(canary.regions.values()))
        flat, places = readable(batch, region)
        if not places:
            return False
        (position, element), (_, other) = places[2], places[4]
        slots = region.sources[0].page_size
        rows = (batch.tables[region.name].pool_page or (slots, slots))[0]
        hit.update(flat=flat, was=flat.clone(), position=position, step=canary.forwards, region=region.name)
        if edit == "swap":
            flat[element], flat[other] = hit["was"][other], hit["was"][element]
        elif edit == "stale":
            flat[element] = (int(flat[element]) + rows) % (region.slots // slots * rows)
        else:
            null = region.null_slot
            flat[element] = {"beyond": region.slots // slots * rows, "negative": -3, "null": null}[edit]
        return True

    def restore(arguments):
        if hit:
            hit["flat"].copy_(hit["was"])
        return bool(hit)

    guarded.register(AtStep(6, act))
    with in_forward(model, restore) as restored:
        serve(model, Traffic(new_tokens=14))
    assert restored
    found = guarded.violations[0]
    assert found.kind in kinds
    assert (found.region, found.position, found.step) == (hit["region"], hit["position"], hit["step"])
    assert {v.step for v in guarded.violations} == {hit["step"]}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_the_tables_canary_checks_are_the_ones_the_forward_reads(kind, guard):
    """Not copies: same memory, so that nothing can come between them."""
    model, guarded, seen = batching(kind), guard(batching(kind)), {}

    def note(canary, batch):
        seen["checked"] = {t.entries.data_ptr() for t in batch.tables.values()}
        seen["written"] = {t.write_slots.data_ptr() for t in batch.tables.values()}
        return False

    def compare(arguments):
        lists = arguments["read_index"] if arguments["read_index"][0].numel() else arguments["write_index"]
        assert seen["checked"] == {t.data_ptr() for t in lists}
        assert seen["written"] == {t.data_ptr() for t in arguments["write_index"]}
        seen["compared"] = True
        return False

    guarded.register(AtStep(1, note))
    with in_forward(model, compare):
        serve(model, Traffic())
    assert seen["compared"]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_write_to_another_slot_is_found(kind, guard):
    """The write list sends a token where its request will not look: the list and the table disagree, or where there is
    no table for new tokens (a ring), the next read finds the wrong position."""
    model, guarded, hit = batching(kind), guard(batching(kind)), {}

    def act(canary, batch):
        (table,) = batch.tables.values()
        if int(batch.new_lens.sum()) < 3 or not int(batch.prefix_lens.min()):
            return False
        hit["step"] = canary.forwards
        table.write_slots[0], table.write_slots[1] = table.write_slots[1].clone(), table.write_slots[0].clone()
        return True

    guarded.register(AtStep(6, act))
    serve(model, Traffic(new_tokens=14))
    assert hit
    expected = {"llama": {Kind.WRITE_SLOT}, "mistral": {Kind.POSITION, Kind.TOKEN, Kind.UNWRITTEN, Kind.PREFIX}}[kind]
    assert guarded.violations[0].kind in expected
    assert guarded.violations[0].step in (hit["step"], hit["step"] + 1)


@pytest.mark.parametrize(("kind", "layer"), CASES)
def test_a_lost_write_is_found(kind, layer, guard):
    """The store of one layer's V does not run in one step."""
    if not HAS_POOL:
        pytest.skip("Transformers 5.17 never clears its cache: a first write may leave the bytes of an earlier cache")
    model, guarded, hit = batching(kind), guard(batching(kind)), {}

    def act(arguments):
        index, _ = group_of(arguments["cache"], layer)
        write = arguments["write_index"][index]
        if guarded.stats()["forwards"] < 6:
            return False
        value = views(arguments["cache"], layer)[1]
        hit.update(value=value, write=write.clone(), was=value[write].clone())
        return True

    def undo(module, args, output):
        if "was" in hit:
            hit["value"].index_copy_(0, hit["write"], hit.pop("was"))

    handle = model.register_forward_hook(undo)
    with in_forward(model, act):
        serve(model, Traffic())
    handle.remove()
    assert {(v.kind, v.layer, v.half) for v in guarded.violations} == {(Kind.LOST_WRITE, layer, "v")}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_a_freed_block_in_use_is_found(kind, guard):
    """The engine frees a block that a running request still reads, and may hand it out again."""
    if not HAS_POOL:
        pytest.skip("Transformers 5.17 tells when blocks are handed out, not when they are freed")
    model, guarded = batching(kind), guard(batching(kind))

    def act(arguments):
        cache = arguments["cache"]
        allocator = next(iter(cache.cache_allocators.values()))
        tables = [t for t in allocator.block_table.values() if len(t) > 1]
        if guarded.stats()["forwards"] < 4 or not tables:
            return False
        cache.pool.free_blocks(allocator.index, tables[0][:1])
        return True

    with in_forward(model, act) as done:
        serve(model, Traffic(new_tokens=14))
    assert done
    found = guarded.violations[0]
    assert found.kind in (Kind.FREED, Kind.UNWRITTEN, Kind.DOUBLE_FREE)
    for read in (v for v in guarded.violations if v.kind in (Kind.FREED, Kind.UNWRITTEN)):
        assert (read.stored_request, read.step_written) != (None, None)
        assert f"{read.stored_request} wrote it at step {read.step_written}" in read.explanation
    assert found.step <= guarded.stats()["forwards"]


def idle_blocks(arguments):
    """The engine's allocator of layer 0, and its cached blocks that no request has, nor will be given by the next
    call of the pool."""
    _, allocator = group_of(arguments["cache"], 0)
    return allocator, list(allocator.ledger.cached_blocks)


def parking(guard, act):
    """Serves traffic that leaves cached blocks behind and calls ``act(allocator, block)`` on one of them, once."""
    if not HAS_POOL:
        pytest.skip("Transformers 5.17 tells when blocks are handed out, not when they are cached")
    model, guarded, hit = batching("llama"), guard(batching("llama")), {}

    def once(arguments):
        allocator, idle = idle_blocks(arguments)
        if not idle or guarded.stats()["forwards"] < 6:
            return False
        hit.update(block=idle[0], slot=idle[0] * allocator.tokens_per_page)
        act(allocator, idle[0])
        return True

    with in_forward(model, once) as done:
        serve(model, Traffic(new_tokens=12, requests=12, batch_tokens=24))
    assert done
    return guarded, hit["slot"]


def test_a_double_release_of_a_cached_block_is_found(guard):
    """The ledger is told once more that a request lets go of a block that no request has."""
    guarded, slot = parking(guard, lambda allocator, block: allocator.ledger.release(block))
    found = guarded.violations[0]
    assert (found.kind, found.slot, found.stored_state) == (Kind.DOUBLE_FREE, slot, State.PARKED)
    assert found.freed_by is not None
    assert {v.kind for v in guarded.violations} == {Kind.DOUBLE_FREE}


def test_a_cached_block_that_the_pool_hands_out_is_found(guard):
    """The block is in the pool's list of free blocks although the ledger still has it: whoever gets it is told."""

    def act(allocator, block):
        allocator.pool._free_blocks[allocator.index].trees = {
            block // allocator.blocks_per_sector: [block],
            **allocator.pool._free_blocks[allocator.index].trees,
        }
        allocator.pool._free_blocks[allocator.index]._length += 1
        (taken,) = allocator.pool.get_free_blocks(allocator.index, 1)
        assert taken == block

    guarded, slot = parking(guard, act)
    found = guarded.violations[0]
    assert (found.kind, found.slot, found.stored_state) == (Kind.DOUBLE_ALLOC, slot, State.PARKED)
    assert found.stored_request is not None


def test_an_eviction_of_a_block_in_use_is_found(guard):
    """The ledger counts a block as held by nobody, although a running request reads it, and evicts it."""
    if not HAS_POOL:
        pytest.skip("Transformers 5.17 tells when blocks are handed out, not when they are evicted")
    model, guarded, hit = batching("llama"), guard(batching("llama")), {}

    def act(arguments):
        _, allocator = group_of(arguments["cache"], 0)
        hashed = [b for blocks in allocator.block_table.values() for b in blocks if b in allocator.ledger.block_to_hash]
        if guarded.stats()["forwards"] < 6 or not hashed:
            return False
        allocator.ledger.cached_blocks[hashed[0]] = None
        hit["slot"] = hashed[0] * allocator.tokens_per_page
        arguments["cache"].evict_cached_blocks()
        return True

    with in_forward(model, act) as done:
        serve(model, Traffic(new_tokens=14))
    assert done
    found = guarded.violations[0]
    assert (found.kind, found.slot) == (Kind.EVICTED_IN_USE, hit["slot"])


def test_a_foreign_prefix_is_found(guard):
    """Two running requests change places in the block table: every slot holds a valid sequence, of somebody else."""
    model, guarded = batching("llama"), guard(batching("llama"))

    def act(arguments):
        _, allocator = group_of(arguments["cache"], 0)
        long = [name for name, blocks in allocator.block_table.items() if len(blocks) > 2]
        if guarded.stats()["forwards"] < 6 or len(long) < 2:
            return False
        a, b = (allocator.block_table[name] for name in long[:2])
        a[0], b[0] = b[0], a[0]
        return a[0] != b[0]

    with in_forward(model, act) as done:
        serve(model, Traffic(new_tokens=14, options={"allow_block_sharing": False}))
    assert done
    assert guarded.violations[0].kind in (Kind.TOKEN, Kind.PREFIX)
    assert guarded.violations[0].position < 8
    assert guarded.violations[0].request != guarded.violations[0].stored_request
