"""SGLang's radix cache over its own allocators, without an engine: parked is what is cached and not locked."""

import random
from array import array
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canary_sglang.allocator.lifetime import Lifetime
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import allocators, caches, targets

from canary_adapters import RowPool, kv_layers
from canary_core import Canary, CanaryConfig, Kind, Writers
from canary_core.plugins import private_hooks
from canary_core.records import POSITION, State
from canary_core.testing import Findings

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
SIZE = 64


class Cached:
    """A radix cache of ``page_size`` tokens a page with an allocator of `SIZE` slots, both followed, and requests that
    use them as SGLang's scheduler does."""

    def __init__(self, page_size: int, need_sort: bool = False) -> None:
        from sglang.srt.mem_cache import allocator as module
        from sglang.srt.mem_cache.radix_cache import RadixCache

        common = dict(dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=need_sort)
        kind = module.TokenToKVPoolAllocator if page_size == 1 else module.PagedTokenToKVPoolAllocator
        self.allocator = kind(SIZE, **common) if page_size == 1 else kind(SIZE, page_size, **common)
        self.cache = RadixCache.create_simulated(mock_allocator=self.allocator, page_size=page_size)
        self.findings = Findings()
        keys, values = (torch.zeros(SIZE + page_size, 4) for _ in "kv")
        (region,) = RowPool("full", kv_layers([keys], [values]), null_slot=0).regions()
        config = CanaryConfig.load(mode="log", silence_s=0)
        self.canary = Canary([region], config, hooks=private_hooks(self.findings))
        runner = SimpleNamespace(token_to_kv_pool_allocator=self.allocator, server_args=None)
        self.lifetime = Lifetime(runner, self.canary, RequestWriters(Writers(), torch.device("cpu")))
        for target in allocators.allocator_functions():
            owner, _, name = target.rpartition(".")
            if owner.endswith(kind.__name__):
                hooked = partial(self.lifetime.call, name, getattr(kind, name), self.allocator)
                setattr(self.allocator, name, hooked)
        for target in targets.PARKING:
            name = target.rpartition(".")[2]
            setattr(
                self.cache, name, partial(self.lifetime.cache_called, target, getattr(RadixCache, name), self.cache)
            )
        self.running: list[tuple[Any, Any, torch.Tensor, int]] = []

    def key(self, tokens: list[int]) -> Any:
        """As the cache takes it."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens), None)

    def begin(self, tokens: list[int]) -> bool:
        """A request takes what is cached of its tokens and is given slots for the others; False where there is no room
        for it."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams

        hit = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        self.cache.inc_lock_ref(hit.last_device_node)
        size = self.allocator.page_size
        needed = -(-(len(tokens) - len(hit.device_indices)) // size) * size
        if needed > self.allocator.available_size():
            self.cache.evict(EvictParams(num_tokens=needed - self.allocator.available_size()))
        slots = self.allocator.alloc(needed) if needed else torch.empty(0, dtype=torch.int64)
        if slots is None:
            self.cache.dec_lock_ref(hit.last_device_node)
            return False
        own = torch.cat((hit.device_indices, slots))
        self.running.append((tokens, hit.last_device_node, own, len(hit.device_indices)))
        return True

    def publish(self, index: int) -> None:
        """A request's tokens so far go into the cache, and it holds them there, as after a chunk of its prefill."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams

        tokens, node, own, protected = self.running[index]
        key = self.key(tokens).page_aligned(self.cache.page_size)
        known = self.cache.insert(InsertParams(key=key, value=own[: len(key)].clone())).prefix_len
        if known > protected:
            self.allocator.free(own[protected:known])
        hit = self.cache.match_prefix(MatchPrefixParams(key=key))
        own = torch.cat((hit.device_indices, own[len(hit.device_indices) :]))
        self.cache.dec_lock_ref(node)
        self.cache.inc_lock_ref(hit.last_device_node)
        self.running[index] = tokens, hit.last_device_node, own, len(hit.device_indices)

    def end(self, index: int, insert: bool, grouped: bool = False) -> None:
        """A request ends: its tokens go into the cache, or its own slots go back."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        tokens, node, own, protected = self.running.pop(index)
        key = self.key(tokens).page_aligned(self.cache.page_size)
        if grouped:
            self.allocator.free_group_begin()
        known = protected
        if insert:
            known = self.cache.insert(InsertParams(key=key, value=own[: len(key)].clone())).prefix_len
        done = len(key) if insert else protected
        for part in (own[protected:known], own[done:]):
            if len(part):
                self.allocator.free(part)
        self.cache.dec_lock_ref(node)
        if grouped:
            self.allocator.free_group_end()

    def nodes(self) -> Iterator[Any]:
        """All but the root."""
        todo = list(self.cache.root_node.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def slots_by_state(self) -> dict[str, set[int]]:
        """What Canary holds to be parked, free, and in use."""
        self.canary.drain()
        words = self.canary.states["full"].records[:, POSITION]
        free, parked = words & State.FREED != 0, words & State.PARKED != 0
        masks = {"parked": parked & ~free, "freed": free, "held": ~parked & ~free & (words != 0)}
        return {name: set(mask.nonzero()[:, 0].tolist()) for name, mask in masks.items()}

    def agrees(self) -> None:
        """Asserts that Canary, the cache and the allocator say the same of every slot."""
        told = self.slots_by_state()
        parked = {s for node in self.nodes() if node.lock_ref == 0 for s in node.value.tolist()}
        size = self.allocator.page_size
        pages = torch.cat([self.allocator.free_pages, *allocators.released_pages(self.allocator)]).tolist()
        free = {page * size + i for page in pages for i in range(size)}
        assert told["parked"] == parked
        assert told["freed"] <= free
        assert told["held"].isdisjoint(free | parked)


@pytest.fixture(params=[(1, False), (1, True), (4, False), (4, True)], ids=["token", "token_sort", "page", "page_sort"])
def cached(request: pytest.FixtureRequest) -> Cached:
    """Caches and allocators of each sort."""
    return Cached(*request.param)


def test_slots_are_parked_while_nobody_has_locked_them(cached):
    """Random requests with shared prefixes that publish, end, are dropped, and make the cache evict, one by one and in
    groups: always what the cache's locks say, and nothing is found."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4) for _ in range(24)] for _ in range(3)]
    evicted = 0
    for _ in range(300):
        before = len(cached.slots_by_state()["parked"])
        if len(cached.running) < 3 and rng.random() < 0.6:
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
    assert evicted > 20


def test_a_free_of_cached_slots_beside_the_cache_is_found(cached):
    """Slots of a node that no request has go to the allocator although the cache keeps them: released twice."""
    cached.begin(list(range(8)))
    cached.end(0, insert=True)
    (node,) = cached.nodes()
    cached.canary.drain()
    cached.allocator.free(node.value[: cached.cache.page_size].clone())
    cached.canary.drain()
    (found,) = cached.findings.violations
    assert (found.kind, found.slot, found.stored_state) == (Kind.DOUBLE_FREE, int(node.value[0]), State.PARKED)


def test_an_eviction_of_a_locked_node_is_found(cached):
    """The cache's list of leaves that may go has one that a request holds."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cached.begin(list(range(8)))
    cached.publish(0)
    (node,) = cached.nodes()
    assert node.lock_ref == 1
    cached.cache.evictable_leaves.add(node)
    cached.cache.evict(EvictParams(num_tokens=1))
    cached.canary.drain()
    found = cached.findings.violations
    assert {v.kind for v in found} == {Kind.EVICTED_IN_USE}
    assert found[0].slot in node.value.tolist()


def test_a_hand_out_of_a_cached_page_is_found(cached):
    """The allocator's list names a page that the cache still has."""
    cached.begin(list(range(8)))
    cached.end(0, insert=True)
    (node,) = cached.nodes()
    cached.canary.drain()
    # As if the list itself had been overwritten.
    cached.allocator.free_pages[0] = int(node.value[0]) // cached.cache.page_size
    cached.allocator.alloc(cached.cache.page_size)
    cached.canary.drain()
    (found,) = cached.findings.violations
    assert (found.kind, found.slot, found.stored_state) == (Kind.DOUBLE_ALLOC, int(node.value[0]), State.PARKED)


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


def test_only_a_plain_radix_cache_parks():
    """Not one of another class, of another allocator, for bigrams or switched off; nor one whose insertions do not say
    what they have made."""
    own = Cached(1)
    assert caches.parks(own.cache, own.allocator)
    assert not caches.parks(own.cache, object())
    assert not caches.parks(SimpleNamespace(token_to_kv_pool_allocator=own.allocator), own.allocator)
    for name in ("disable", "is_eagle"):
        setattr(own.cache, name, True)
        assert not caches.parks(own.cache, own.allocator)
        setattr(own.cache, name, False)
    insert = own.cache._insert_helper
    own.cache._insert_helper = lambda *args: own.lifetime.cache_called(
        targets.INSERT, lambda cache, *args: insert.args[1](cache, *args)[0], own.cache, *args
    )
    own.cache.insert = lambda params: SimpleNamespace(
        prefix_len=own.cache._insert_helper(own.cache.root_node, params.key, params.value)
    )
    own.begin(list(range(8)))
    own.end(0, insert=True)
    assert own.slots_by_state()["parked"] == set()


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
