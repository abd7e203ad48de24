"""SGLang's prefix caches over its own allocators, without an engine; requests use them as its scheduler has them do."""

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canary_sglang.allocator.lifetime import Lifetime
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import allocators, targets

from canary_adapters import RowPool, kv_layers
from canary_core import Canary, CanaryConfig, Writers
from canary_core.plugins import private_hooks
from canary_core.records import POSITION, State
from canary_core.testing import Findings

SIZE = 64


class Cached:
    """A `RadixCache` of ``page_size`` tokens a page with an allocator of `SIZE` slots, both followed, and requests that
    use them as SGLang's scheduler does."""

    def __init__(self, page_size: int, need_sort: bool = False) -> None:
        from sglang.srt.mem_cache import allocator as module

        common = dict(dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=need_sort)
        kind = module.TokenToKVPoolAllocator if page_size == 1 else module.PagedTokenToKVPoolAllocator
        self.allocator = kind(SIZE, **common) if page_size == 1 else kind(SIZE, page_size, **common)
        self.cache = self.make(page_size)
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
        for target, change in targets.PARKING.items():
            owner, _, name = target.rpartition(".")
            if owner.endswith(f".{type(self.cache).__name__}") and hasattr(self.cache, name):
                setattr(self.cache, name, self._hooked(change, getattr(type(self.cache), name)))
        self.running: list[tuple[Any, Any, torch.Tensor, int]] = []

    def make(self, page_size: int) -> Any:
        """The cache, on `allocator`."""
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache.create_simulated(mock_allocator=self.allocator, page_size=page_size)

    def key(self, tokens: list[int]) -> Any:
        """As the cache takes it. Tokens of prompts that begin with an even one are in a namespace, as those of a LoRA
        adapter."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens), "adapter" if tokens[0] % 2 == 0 else None)

    def slots_of(self, hit: Any) -> torch.Tensor:
        """The slots that the cache has for what was asked of it."""
        node, parts = hit.last_device_node, [torch.empty(0, dtype=torch.int64)]
        while node is not self.cache.root_node:
            parts.insert(1, node.value)
            node = node.parent
        return torch.cat(parts)

    def lock(self, node: Any) -> Any:
        """Locks the node; gives what `unlock` wants."""
        self.cache.inc_lock_ref(node)
        return node

    def unlock(self, locked: Any) -> None:
        """Takes a lock back."""
        self.cache.dec_lock_ref(locked)

    def make_room(self, tokens: int) -> None:
        """Makes the cache evict so many tokens, if it can."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens))

    def insert(self, key: Any, own: torch.Tensor, protected: int) -> None:
        """What a request has goes into the cache; what that had already, from ``protected`` on, is freed."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        known = self.cache.insert(InsertParams(key=key, value=own[: len(key)].clone())).prefix_len
        if known > protected:
            self.allocator.free(own[protected:known])

    def begin(self, tokens: list[int]) -> bool:
        """A request takes what is cached of its tokens and is given slots for the others; False where there is no room
        for it."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        hit = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        locked, cached = self.lock(hit.last_device_node), self.slots_of(hit)
        size = self.allocator.page_size
        needed = -(-(len(tokens) - len(cached)) // size) * size
        if needed > self.allocator.available_size():
            self.make_room(needed - self.allocator.available_size())
        slots = self.allocator.alloc(needed) if needed else torch.empty(0, dtype=torch.int64)
        if slots is None:
            self.unlock(locked)
            return False
        self.running.append((tokens, locked, torch.cat((cached, slots)), len(cached)))
        return True

    def publish(self, index: int) -> None:
        """A request's tokens so far go into the cache, and it holds them there, as after a chunk of its prefill."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        tokens, locked, own, protected = self.running[index]
        key = self.key(tokens).page_aligned(self.cache.page_size)
        self.insert(key, own, protected)
        hit = self.cache.match_prefix(MatchPrefixParams(key=key))
        cached = self.slots_of(hit)
        self.unlock(locked)
        own = torch.cat((cached, own[len(cached) :]))
        self.running[index] = tokens, self.lock(hit.last_device_node), own, len(cached)

    def end(self, index: int, insert: bool, grouped: bool = False) -> None:
        """A request ends: its tokens go into the cache, or its own slots go back."""
        tokens, locked, own, protected = self.running.pop(index)
        key = self.key(tokens).page_aligned(self.cache.page_size)
        if grouped:
            self.allocator.free_group_begin()
        if insert:
            self.insert(key, own, protected)
        done = len(key) if insert else protected
        if len(own[done:]):
            self.allocator.free(own[done:])
        self.unlock(locked)
        if grouped:
            self.allocator.free_group_end()

    def flush(self) -> None:
        """Everything is given up, as SGLang does it while no request runs."""
        self.running.clear()
        self.cache.reset()
        self.allocator.clear()

    def nodes(self) -> Iterator[Any]:
        """All but the root."""
        todo = list(self.cache.root_node.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def unlocked(self) -> torch.Tensor:
        """Slots of the nodes that nobody has locked, by the cache itself."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *(n.value for n in self.nodes() if n.lock_ref == 0)])

    def evict_locked(self) -> torch.Tensor:
        """Makes the cache evict the node of the only running request, as if it had its locks wrong; gives its slots."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        (node,) = self.nodes()
        assert node.lock_ref == 1
        self.cache.evictable_leaves.add(node)
        self.cache.evict(EvictParams(num_tokens=1))
        return node.value

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
        parked = set(self.unlocked().tolist())
        size = self.allocator.page_size
        pages = torch.cat([self.allocator.free_pages, *allocators.released_pages(self.allocator)]).tolist()
        free = {page * size + i for page in pages for i in range(size)}
        assert told["parked"] == parked
        assert told["freed"] <= free
        assert told["held"].isdisjoint(free | parked)

    def _hooked(self, change: targets.CacheChange, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.lifetime.cache_called(change, original, self.cache, args, kwargs)

        return call


class UnifiedCached(Cached):
    """The same with a `UnifiedRadixCache` whose core is in Python or in Rust: ``core``."""

    core = "python"

    def make(self, page_size: int) -> Any:
        """See `Cached`. Raises `AttributeError` where this release has no such core."""
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=page_size,
            tree_components=(ComponentType.FULL,),
        )  # fmt: skip
        with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(self.core):
            return UnifiedRadixCache(params)

    def slots_of(self, hit: Any) -> torch.Tensor:
        """See `Cached`."""
        core = self.cache.tree_core
        slots: torch.Tensor = core.collect_full_device_indices(hit.last_device_node, self.cache.root_node_handle())
        return slots

    def lock(self, node: Any) -> Any:
        """See `Cached`."""
        return node, self.cache.inc_lock_ref(node).to_dec_params()

    def unlock(self, locked: Any) -> None:
        """See `Cached`."""
        self.cache.dec_lock_ref(*locked)

    def make_room(self, tokens: int) -> None:
        """See `Cached`."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict_for_alloc(EvictParams(num_tokens=tokens))

    def insert(self, key: Any, own: torch.Tensor, protected: int) -> None:
        """See `Cached`. This cache frees by itself what it had already."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        self.cache.insert(InsertParams(key=key, value=own[: len(key)].clone(), prev_prefix_len=protected))

    def unlocked(self) -> torch.Tensor:
        """See `Cached`."""
        slots: torch.Tensor = self.cache.tree_core.walk_for_kv_canary(
            unlocked_only=True, swa_resident_only=False
        ).slot_indices
        return slots

    def evict_locked(self) -> torch.Tensor:
        """See `Cached`."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        core = self.cache.tree_core
        slots = self.running[0][2][: self.running[0][3]]
        advance = core.evict_device_next_node

        def wrong(kind: Any, *args: Any) -> Any:
            del core.evict_device_next_node
            step = advance(kind, *args)
            step.device_frees[kind].append(slots)
            return step

        core.evict_device_next_node = wrong
        self.cache.evict(EvictParams(num_tokens=1))
        return slots


class RustCached(UnifiedCached):
    """The same with the core in Rust."""

    core = "rust"


CACHES = {"radix": Cached, "unified": UnifiedCached, "rust": RustCached}
CORES = {"unified": "python", "rust": "rust"}
"""Those of them that are unified, and in what their core is."""
SORTS = {"token": (1, False), "token_sort": (1, True), "page": (4, False), "page_sort": (4, True)}
"""Tokens of a page, and whether the allocator sorts what is freed."""


def make(kind: str, sort: str = "token") -> Cached:
    """One of `CACHES`; skips the test where this release has none."""
    if kind in CORES and not _has_core(CORES[kind]):
        pytest.skip(f"this release has no UnifiedRadixCache that says enough with a core in {CORES[kind]}")
    return CACHES[kind](*SORTS[sort])


def _has_core(core: str) -> bool:
    """Whether this SGLang's `UnifiedRadixCache` may have a core in ``python`` or in ``rust`` that says what `locks_of`
    wants to know."""
    try:
        from sglang.srt.mem_cache.unified_cache import tree_core_registry as registry
        from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
    except ImportError:
        return False
    return core in registry.registered_tree_core_backends() and hasattr(UnifiedTreeCore, "validate_buffer_backup")
