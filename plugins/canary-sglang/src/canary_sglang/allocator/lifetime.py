"""Tells Canary which slots SGLang's allocators hand out and take back.

Nothing here waits for the device. The events take effect before the next forward, on its stream.
"""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

from canary_core import Canary, Event, Region
from canary_sglang.allocator.free_lists import Follower
from canary_sglang.allocator.owners import Owners
from canary_sglang.allocator.parking import Parking
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import allocators, caches, targets
from canary_sglang.compat.registrar import Hook
from canary_sglang.pools import mamba


class Lifetime:
    """Follows the allocators of one runner. ``owners``: for which request they are called at the moment.

    A ``lifetime_off`` event names regions whose allocator can't be followed, or no longer; from then on none of their
    slots counts as freed.
    """

    def __init__(self, runner: Any, canary: Canary, writers: RequestWriters) -> None:
        self._canary = canary
        self.owners = Owners(writers)
        self._followers: dict[int, Follower] = {}
        self.parking: Parking | None = None
        allocator = runner.token_to_kv_pool_allocator
        refusal = allocators.lifetime_refusal(runner)
        if refusal is not None:
            self._off(canary.regions, refusal)
            return
        # Keeps the allocators alive: `_followers` knows them by their ``id()``.
        self._lists = allocators.page_allocators(allocator)
        states_allocator = allocators.state_allocator(runner)
        if allocators.hands_out_states(states_allocator):
            self._lists[mamba.REGION] = states_allocator
        lists = {**allocators.ALLOCATED_REGIONS, mamba.REGION: mamba.REGION}
        wanted = {name: r for name, r in canary.regions.items() if name in lists}
        for kind, part in self._lists.items():
            # A page has the same number in all regions that share a list; its slots are counted for each region.
            slots = {n: _page_slots(part, r) for n, r in wanted.items() if lists[n] == kind}
            followed = {name: count for name, count in slots.items() if count}
            if followed:
                self._followers[id(part)] = Follower(part, canary, followed, writers)
        # The list that the prefix cache takes its slots from and gives them back to.
        cached = self._followers.get(id(allocator))
        whole = cached is not None and set(cached.regions.values()) == {allocators.page_tokens(allocator)}
        if cached is not None and whole and caches.parking_refusal(runner) is None:
            self.parking = Parking(canary, tuple(cached.regions), self.owners.freer)
            self.owners.evicting = lambda: self.parking is not None and self.parking.evicting
        left = wanted.keys() - {name for f in self._followers.values() for name in f.regions}
        if left:
            unknown = states_allocator if left == {mamba.REGION} else allocator
            self._off(left, f"{type(unknown).__name__} is not an allocator that this canary-sglang knows")

    def cache_called(self, target: str, original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a function of `targets.PARKING` and tells Canary which slots nobody holds after it."""
        allocator = getattr(cache, "token_to_kv_pool_allocator", None)
        follower = self._followers.get(id(allocator)) if self._canary.enabled else None
        if self.parking is None or follower is None or not caches.parks(cache, allocator):
            return original(cache, *args, **kwargs)
        if target != targets.EVICT:
            return self.parking.call(target, original, cache, *args, **kwargs)
        before = follower.listed()
        result = self.parking.call(target, original, cache, *args, **kwargs)
        if caches.evicted(result) and follower.listed() == before:
            follower.evicted_waits()
        return result

    def call(self, name: str, original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the function ``name`` of an allocator and tells Canary what it did."""
        follower = self._followers.get(id(allocator))
        if follower is None or not self._canary.enabled:
            return original(allocator, *args, **kwargs)
        # A cleared list can be followed again, whatever happened to it before.
        intact = name == allocators.CLEAR or follower.intact()
        result = original(allocator, *args, **kwargs)
        with self._canary.guard(name):
            if not intact or not follower.called(name, self.owners, args, kwargs):
                del self._followers[id(allocator)]
                for region in follower.regions:
                    self._canary.slots.end_lifetime(region)
                self.parking = None
                self._off(follower.regions, f"the free list was changed by something else than {name} and its like")
        return result

    def _off(self, regions: Collection[str], reason: str) -> None:
        self._canary.tell(Event("lifetime_off", "warning", {"regions": sorted(regions), "reason": reason}))


class Guarded(Protocol):
    """What the hooks need of a `Session`."""

    canary: Canary
    lifetime: Lifetime | None


def allocator_hooks(session: Callable[[], Guarded | None]) -> dict[str, Hook]:
    """Hooks for the functions of SGLang that change an allocator's list, and for those that say for which request.
    ``session``: gives the session whose allocator is followed now, None if there is none. Imports SGLang."""

    def changing(name: str, original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
        guarded = session()
        if guarded is None or guarded.lifetime is None:
            return original(allocator, *args, **kwargs)
        return guarded.lifetime.call(name, original, allocator, *args, **kwargs)

    def parking(target: str, original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> Any:
        guarded = session()
        if guarded is None or guarded.lifetime is None:
            return original(cache, *args, **kwargs)
        return guarded.lifetime.cache_called(target, original, cache, *args, **kwargs)

    def lifetime() -> Lifetime | None:
        guarded = session()
        return guarded.lifetime if guarded is not None and guarded.canary.enabled else None

    def preparing(decode: bool, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        followed = lifetime()
        with followed.owners.preparing(batch, decode) if followed else nullcontext():
            return original(batch, *args, **kwargs)

    def releasing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        followed, request = lifetime(), args[0] if args else kwargs.get("req")
        release = partial(original, *args, **kwargs)
        return followed.owners.releasing(request, release) if followed and request is not None else release()

    functions: dict[str, Callable[..., Any]] = {
        target: partial(changing, target.rpartition(".")[2]) for target in allocators.allocator_functions()
    }
    parks: dict[str, Callable[..., Any]] = {
        target: partial(parking, target) for target in targets.existing(targets.PARKING)
    }
    prepares: dict[str, Callable[..., Any]] = {
        t: partial(preparing, t == targets.DECODES) for t in targets.existing(targets.PREPARES)
    }
    releases = dict.fromkeys(targets.existing(targets.RELEASES), releasing)
    return {target: (hook, "AROUND") for target, hook in {**functions, **parks, **prepares, **releases}.items()}


def _page_slots(allocator: Any, region: Region) -> int:
    """Slots of ``region`` in a page of the allocator; 0 if a page is not a whole number of slots."""
    slots, rest = divmod(allocators.page_tokens(allocator), region.tokens_per_slot)
    return 0 if rest else slots
