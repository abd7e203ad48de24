"""Which prefix caches say by their locks what no request holds; what they say is tested with `Parking`."""

from types import SimpleNamespace

import pytest
from canary_sglang.compat.cache_locks import RadixLocks, UnifiedLocks, locks_of
from tools.prefix_caches import CACHES, make

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("kind", CACHES)
def test_only_known_caches_say_what_is_parked(kind):
    """Not one of another class, or of another allocator, or of bigrams."""
    own = make(kind)
    locks = locks_of(own.cache, own.allocator)
    assert isinstance(locks, RadixLocks if kind == "radix" else UnifiedLocks)
    assert "allocator" in locks_of(own.cache, object())
    assert "SimpleNamespace" in locks_of(SimpleNamespace(token_to_kv_pool_allocator=own.allocator), own.allocator)
    (own.cache if kind == "radix" else own.cache.tree_core).is_eagle = True
    assert "bigrams" in locks_of(own.cache, own.allocator)


@pytest.mark.parametrize(
    ("name", "value"), [("cache_controller", object()), ("linker", object()), ("enable_session_radix_cache", True)]
)
def test_a_unified_cache_that_holds_slots_in_other_ways_is_not_followed(name, value):
    """Host memory, another store, sessions: their slots may have no lock."""
    own = make("unified")
    setattr(own.cache, name, value)
    assert name in locks_of(own.cache, own.allocator)


def test_a_cache_with_a_window_is_not_followed():
    """A `UnifiedRadixCache` of two components: what the window lets go of has locks of its own."""
    own = make("unified")
    own.cache.tree_components = (*own.cache.tree_components, SimpleNamespace(name="SWA"))
    assert "FULL, SWA" in locks_of(own.cache, own.allocator)


def test_a_unified_cache_whose_nodes_do_not_add_up_is_in_doubt():
    """Its count changes by other tokens than the nodes of the locked path have: the doubt names both."""
    own = make("unified")
    own.begin(list(range(1, 9)))
    own.end(0, insert=True)
    own.begin(list(range(1, 9)))
    locks, core = UnifiedLocks(own.cache), own.cache.tree_core
    locks.before()
    assert locks.doubt == ""
    core.component_evictable_size_[own.cache.tree_components[0]] += 5
    assert not locks.after("unlock", own.running[0][1], {}, None)
    assert "5 tokens" in locks.doubt


def test_a_unified_cache_that_changes_the_wrong_way_is_in_doubt():
    """More tokens are unlocked after a lock."""
    own = make("unified")
    locks = UnifiedLocks(own.cache)
    locks.before()
    own.cache.tree_core.component_evictable_size_[own.cache.tree_components[0]] += 5
    assert not locks.after("lock", (), {}, None)
    assert "lock" in locks.doubt
    assert "+5" in locks.doubt
