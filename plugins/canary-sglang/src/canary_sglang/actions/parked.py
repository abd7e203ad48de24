"""`RadixPrefixes`: KV of ended requests in SGLang's radix cache, remembered to be computed again."""

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from canary_adapters import PROOF_SHARE, ParkedPrefix, ParkedPrefixes, is_internal
from canary_core import Patches
from canary_sglang.actions.touches import touches
from canary_sglang.compat import caches, schedulers

NONE = array("q")


@dataclass(slots=True, eq=False, kw_only=True)
class RadixPrefix(ParkedPrefix):
    """Takes the place of SGLang's own request in the making of an internal one. content: int64 ids of whole pages. key:
    the same ids, with the tokens `looked_ahead` at. cache: the prefix cache, asked anew each time, without a lock and
    without a change to the order of eviction. slots: those of each region, of slots as numbered in the engine's tables,
    and of states. extra_key, cache_salt: as in the request's key there. lora_id: the request's adapter, None for
    none."""

    cache: Any
    slots: Callable[[Tensor, Tensor], Sequence[Tensor]]
    key: "array[int]"
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None

    output_ids = NONE

    @property
    def origin_input_ids(self) -> Any:
        """See `content`."""
        return self.content

    def left(self) -> int:
        """See `ParkedPrefix`. Slots may be others than those of the request, written by another one with the same
        tokens: the next hit reads the present ones."""
        return caches.matched(self.cache, self.key, self.extra_key, self.cache_salt)[0]

    def lowest(self) -> Any:
        """The lowest node of the tokens counted by `left`."""
        return caches.matched(self.cache, self.key, self.extra_key, self.cache_salt)[1]

    def blocks(self) -> Sequence[Tensor]:
        """Slots of each region by position, in the place of blocks; no more than are left."""
        where = self.cache, self.key, self.extra_key, self.cache_salt
        return self.slots(caches.matched_slots(*where), caches.matched_state(*where))


class RadixPrefixes:
    """Follows the KV taken by the ``cache`` of a scheduler from ended requests, until `close`.

    ``tokens``: size of the pool. ``slots``: see `RadixPrefix`. ``sheltered``: a context for code that is not the
    engine's.
    """

    def __init__(
        self,
        cache: Any,
        tokens: int,
        slots: Callable[[Tensor, Tensor], Sequence[Tensor]],
        sheltered: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.cache = cache
        self.known = ParkedPrefixes.of_cache(tokens)
        self._slots, self._sheltered = slots, sheltered
        self._stuck = -1, -1
        self._patches = Patches()
        self._patches.wrap(cache, caches.publishes(cache), self._publishes)

    def make_room(self, prefix: RadixPrefix, tokens: int) -> bool:
        """Whether so many slots are free for a proof of ``prefix``: see `InternalRequests.spare`. SGLang evicts leaves
        as a whole, so up to twice `PROOF_SHARE`. Follows from the cache and the pool alone, so that all ranks do the
        same."""
        pool = self.cache.token_to_kv_pool_allocator
        most = int(PROOF_SHARE * int(pool.size))
        while (free := int(pool.available_size())) < tokens <= most:
            sizes = free, int(self.cache.evictable_size())
            node, length = (None, 0) if sizes == self._stuck else caches.oldest_leaf(self.cache)
            if node is None or length > most:
                # The same for each other prefix, in an engine that stays as it is.
                self._stuck = sizes
                break
            evicted = 0 if node == prefix.lowest() else caches.evict_oldest_leaf(self.cache)
            if not evicted:
                break
            self.known.evicted(evicted)
        return tokens <= free

    def close(self) -> None:
        """Nothing is followed any more."""
        self._patches.undo()

    def _publishes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def publish(request: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(request, *args, **kwargs)
            # A retracted request goes on.
            if request.finished() and not is_internal(request.rid):
                with self._sheltered():
                    self._ended(request, int(kwargs["up_to"]))
            return result

        return publish

    def _ended(self, request: Any, tokens: int) -> None:
        why, content, key = schedulers.again_refusal(request, None), NONE, NONE
        if why is None:
            ids = array("q", (request.origin_input_ids + request.output_ids)[:tokens])
            page, more = int(self.cache.page_size), caches.looked_ahead(self.cache)
            content = ids[: max(0, len(ids) - more) // page * page]
            key = ids[: len(content) + more]
            if self.cache.supports_mamba():
                # No further than the last state that the cache was given.
                content = content[: caches.matched(self.cache, key, request.extra_key, request.cache_salt)[0]]
                key = ids[: len(content) + more]
        self.known.add(
            RadixPrefix(
                name=request.rid, content=content, touches=touches(request), why=why, cache=self.cache,
                prompt=len(request.origin_input_ids), slots=self._slots, key=key, extra_key=request.extra_key,
                cache_salt=request.cache_salt, lora_id=request.lora_id,
            )
        )  # fmt: skip
