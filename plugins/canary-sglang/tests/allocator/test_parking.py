"""SGLang's prefix caches over its own allocators, without an engine: parked is what is cached and not locked."""

import random
from types import SimpleNamespace

import pytest
from canary_sglang.compat import caches
from canary_sglang.compat.cache_locks import keeps_nothing
from tools.prefix_caches import CACHES, CORES, SORTS, Cached, make

from canary_core import Kind
from canary_core.records import State

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=CACHES)
def kind(request: pytest.FixtureRequest) -> str:
    """Each sort of cache."""
    name: str = request.param
    return name


@pytest.fixture(params=SORTS)
def cached(request: pytest.FixtureRequest, kind: str) -> Cached:
    """Caches and allocators of each sort."""
    return make(kind, request.param)


def test_slots_are_parked_while_nobody_has_locked_them(cached):
    """Random requests with shared prefixes, in two namespaces, that publish, end, are dropped, and make the cache
    evict, one by one and in groups, and flushes between them: always what the cache's locks say, and nothing is
    found."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4) for _ in range(24)] for _ in range(3)]
    evicted = 0
    for step in range(400):
        before = len(cached.slots_by_state()["parked"])
        if step % 100 == 99:
            cached.flush()
        elif len(cached.running) < 3 and rng.random() < 0.6:
            cached.begin([*rng.choice(prompts)[: rng.randrange(1, 24)], *(rng.randrange(9) for _ in range(3))])
        elif cached.running:
            index = rng.randrange(len(cached.running))
            if rng.random() < 0.4:
                cached.publish(index)
            else:
                cached.end(index, insert=rng.random() < 0.8, grouped=rng.random() < 0.3)
        evicted += len(cached.slots_by_state()["parked"]) < before
        cached.agrees()
    assert cached.findings.violations == []
    assert cached.lifetime.parking is not None
    assert evicted > 20


def test_changes_between_two_events_are_told_as_what_they_come_to(kind):
    """Random requests as above, but Canary is looked at every few calls only: nodes are locked, let go of and split
    before anything is told."""
    cached = make(kind)
    rng = random.Random(1)
    prompts = [[rng.randrange(4) for _ in range(24)] for _ in range(3)]
    for _ in range(150):
        for _ in range(rng.randrange(1, 6)):
            if len(cached.running) < 4 and rng.random() < 0.5:
                cached.begin([*rng.choice(prompts)[: rng.randrange(1, 24)], rng.randrange(9)])
            elif cached.running:
                index = rng.randrange(len(cached.running))
                if rng.random() < 0.4:
                    cached.publish(index)
                else:
                    cached.end(index, insert=True)
        cached.agrees()
    assert cached.findings.violations == []


def test_a_node_that_is_split_before_its_lock_is_told(kind):
    """One request locks a node, the next one half of it; the first one lets go: only the other half is parked."""
    cached = make(kind)
    tokens = list(range(1, 9))
    cached.begin(tokens)
    cached.end(0, insert=True)
    assert len(cached.slots_by_state()["parked"]) == 8
    cached.begin(tokens)
    cached.begin(tokens[:4])
    cached.end(0, insert=False)
    cached.agrees()
    assert len(cached.slots_by_state()["parked"]) == 4
    assert cached.findings.violations == []


def test_a_node_that_is_split_before_its_insertion_is_told(kind):
    """A request inserts a node and ends; before that is told, another one locks half of it: the other half is parked,
    and all of it when that ends."""
    cached = make(kind)
    tokens = list(range(1, 9))
    cached.begin(tokens)
    cached.end(0, insert=True)
    cached.begin(tokens[:4])
    cached.agrees()
    assert len(cached.slots_by_state()["parked"]) == 4
    cached.end(0, insert=True)
    cached.agrees()
    assert len(cached.slots_by_state()["parked"]) == 8
    assert cached.findings.violations == []


def test_who_let_go_of_a_node_last_is_its_writer(kind):
    """Two requests hold a node, and both let go of it before that is told: it was parked by the second one."""
    cached = make(kind)
    tokens = list(range(1, 9))
    cached.begin(tokens)
    cached.publish(0)
    cached.begin(tokens)
    cached.canary.drain()
    owners = cached.lifetime.owners
    for name in ("first", "second"):
        owners.releasing(SimpleNamespace(rid=name), lambda: cached.unlock(cached.running.pop()[1]))
    told = []
    cached.canary.slots.park = lambda region, slots, writer, *more: told.append((writer, len(slots)))
    cached.canary.slots.settle()
    assert told == [(owners._writers.id("second"), 8)]


def test_a_request_that_goes_on_costs_no_event(kind):
    """What a chunk of a prefill lets go of, inserts and locks again comes to nothing."""
    cached = make(kind)
    cached.begin(list(range(1, 9)))
    cached.publish(0)
    cached.publish(0)
    cached.canary.drain()
    assert {"park", "share"}.isdisjoint(cached.canary.slots.counts["full"])


def test_a_free_of_cached_slots_beside_the_cache_is_found(cached):
    """Slots of a node that no request has go to the allocator although the cache keeps them: released twice."""
    cached.begin(list(range(8)))
    cached.end(0, insert=True)
    slots = cached.unlocked()
    cached.canary.drain()
    cached.allocator.free(slots[: cached.cache.page_size].clone())
    cached.canary.drain()
    (found,) = cached.findings.violations
    assert (found.kind, found.slot, found.stored_state) == (Kind.DOUBLE_FREE, int(slots[0]), State.PARKED)


def test_an_eviction_of_a_locked_node_is_found(cached):
    """The cache holds a node for one that may go while a request holds it."""
    cached.begin(list(range(8)))
    cached.publish(0)
    slots = cached.evict_locked()
    cached.canary.drain()
    found = cached.findings.violations
    assert {v.kind for v in found} == {Kind.EVICTED_IN_USE}
    assert found[0].slot in slots.tolist()


def test_a_hand_out_of_a_cached_page_is_found(cached):
    """The allocator's list names a page that the cache still has."""
    cached.begin(list(range(8)))
    cached.end(0, insert=True)
    slots = cached.unlocked()
    cached.canary.drain()
    # As if the list itself had been overwritten.
    cached.allocator.free_pages[0] = int(slots[0]) // cached.cache.page_size
    cached.allocator.alloc(cached.cache.page_size)
    cached.canary.drain()
    (found,) = cached.findings.violations
    assert (found.kind, found.slot, found.stored_state) == (Kind.DOUBLE_ALLOC, int(slots[0]), State.PARKED)


def test_an_eviction_within_a_group_of_frees_is_no_finding(cached):
    """Its pages come back with those of requests, and nothing says which is which."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cached.begin(list(range(8)))
    cached.begin(list(range(20, 28)))
    cached.end(0, insert=True)
    cached.allocator.free_group_begin()
    cached.cache.evict(EvictParams(num_tokens=4))
    cached.end(0, insert=False)
    cached.allocator.free_group_end()
    cached.agrees()
    assert cached.findings.violations == []


def test_a_node_that_is_let_go_of_between_two_evictions_is_no_finding(kind):
    """Its slots are told as parked before they are told as evicted."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cached = make(kind)
    for first in (0, 20):
        cached.begin(list(range(first, first + 8)))
        cached.publish(first // 20)
    cached.end(0, insert=True)
    cached.canary.drain()
    cached.cache.evict(EvictParams(num_tokens=8))
    tokens, locked, own, protected = cached.running.pop()
    assert protected == len(tokens) == len(own)
    cached.unlock(locked)
    cached.cache.evict(EvictParams(num_tokens=8))
    cached.agrees()
    assert cached.slots_by_state()["parked"] == set()
    assert cached.findings.violations == []


@pytest.mark.parametrize("kind", CORES)
def test_a_lock_that_nobody_was_told_of_ends_the_parking(kind):
    """Something else than the cache's known functions locks a node: from then on it is not sure what is parked, so
    nothing is; an event says so, and what the cache evicts and hands out afterwards is no finding."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams

    cached = make(kind)
    for first in (0, 20):
        cached.begin(list(range(first, first + 8)))
        cached.end(0, insert=True)
    assert len(cached.slots_by_state()["parked"]) == 16
    hit = cached.cache.match_prefix(MatchPrefixParams(key=cached.key(list(range(8)))))
    cached.cache.tree_core.inc_lock_ref(hit.last_device_node)
    cached.cache.evict(EvictParams(num_tokens=8))
    assert cached.slots_by_state()["parked"] == set()
    for first in (40, 60, 80, 100, 120, 140, 160, 180):
        cached.begin(list(range(first, first + 8)))
        cached.end(0, insert=True)
    (event,) = [event for event in cached.findings.events if event.name == "parking_off"]
    assert event.level == "warning"
    assert event.fields["regions"] == ["full"]
    assert event.fields["cache"] == "UnifiedRadixCache"
    assert "-8" in str(event.fields["reason"])
    assert cached.slots_by_state()["parked"] == set()
    assert cached.findings.violations == []


def test_insertions_that_do_not_say_what_they_made_end_the_parking():
    """As in releases whose `RadixCache` gives no node: nothing is parked, and an event says why."""
    own = make("radix")
    insert = type(own.cache)._insert_helper
    own.cache._insert_helper = own._hooked("insert", lambda *args: insert(*args)[0])
    own.cache.insert = lambda params: SimpleNamespace(
        prefix_len=own.cache._insert_helper(own.cache.root_node, params.key, params.value)
    )
    own.begin(list(range(8)))
    own.end(0, insert=True)
    assert own.slots_by_state()["parked"] == set()
    (event,) = [event for event in own.findings.events if event.name == "parking_off"]
    assert "insertions do not say" in str(event.fields["reason"])
    assert own.findings.violations == []


def test_a_cache_that_is_not_followed_is_told_once(kind):
    """However many batches it serves; and one that keeps nothing is not told at all."""
    own = make(kind)
    other, none = SimpleNamespace(), SimpleNamespace(disable=True)
    for cache in (other, other, none):
        own.lifetime.meet(cache)
    (event,) = own.findings.events[-1:]
    assert (event.name, event.level, event.fields["cache"]) == ("parking_off", "info", "SimpleNamespace")
    assert [e.name for e in own.findings.events].count("parking_off") == 1
    assert keeps_nothing(none)


@pytest.mark.parametrize(
    "options",
    [
        {"disaggregation_mode": "decode"},
        {"enable_hierarchical_cache": True},
        {"speculative_algorithm": "EAGLE"},
        {"enable_streaming_session": True},
    ],
)
def test_where_slots_are_held_beside_the_cache_nothing_is_parked(options):
    """Then a node that nobody has locked may still be somebody's."""
    assert caches.parking_refusal(SimpleNamespace(server_args=SimpleNamespace(**options))) is not None
    assert caches.parking_refusal(SimpleNamespace(server_args=SimpleNamespace())) is None
