"""Reports slots handed out and taken back by SGLang's allocators to Canary.

Nothing here waits for the device. The events take effect before the next forward, on its stream.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from canary_core import Canary, Event, Level, Region
from canary_sglang.allocator.free_lists import Follower
from canary_sglang.allocator.owners import Owners
from canary_sglang.allocator.parking import Parking
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import allocators, cache_locks, caches, targets
from canary_sglang.compat.cache_locks import CacheLocks
from canary_sglang.compat.registrar import Hook
from canary_sglang.compat.targets import CacheChange
from canary_sglang.pools import mamba


class Lifetime:
    """Follows the allocators of one runner. ``owners``: the requests behind the present calls.

    A ``lifetime_off`` event names regions whose allocator can't be followed, or no longer; from then on none of their
    slots counts as freed. A ``parking_off`` event does the same for a prefix cache; from then on none of its slots
    counts as parked.
    """

    def __init__(self, runner: Any, canary: Canary, writers: RequestWriters) -> None:
        self._canary = canary
        self.owners = Owners(writers)
        self._followers: dict[int, Follower] = {}
        self.parking: Parking | None = None
        self.owners.evicting = lambda: self.parking is not None and self.parking.evicting
        # By their ``id()``, which this keeps from being used again.
        self._caches: dict[int, Any] = {}
        self._runner, self._allocator = runner, runner.token_to_kv_pool_allocator
        allocator = self._allocator
        self._followed = 0
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
        left = wanted.keys() - {name for f in self._followers.values() for name in f.regions}
        if left:
            unknown = states_allocator if left == {mamba.REGION} else allocator
            self._off(left, f"{type(unknown).__name__} is not an allocator that this canary-sglang knows")
        else:
            self._followed = len(self._followers)

    @property
    def whole(self) -> bool:
        """Whether every slot given back is reported, in every region."""
        return 0 < self._followed == len(self._followers)

    def meet(self, cache: Any) -> None:
        """The engine uses ``cache`` now: its locks are followed, or a ``parking_off`` event has the reason. To be
        called before each batch; cheap."""
        if id(cache) in self._caches or not self._followers or not self._canary.enabled:
            return
        self._caches[id(cache)] = cache
        with self._canary.guard("parking"):
            if self.parking is not None or cache_locks.keeps_nothing(cache):
                return
            locks = self._locks(cache)
            if isinstance(locks, str):
                self._no_parking(cache, locks, "info")
                return
            lost = partial(self._lost, cache)
            regions = tuple(self._followers[id(self._allocator)].regions)
            self.parking = Parking(self._canary, locks, regions, self.owners, lost)

    def cache_called(
        self,
        change: CacheChange,
        original: Callable[..., Any],
        cache: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs a function of `targets.PARKING` and reports slots without a holder afterwards."""
        # Each request that begins or ends makes several of these calls, while the engine waits for its host.
        parking = self.parking
        if parking is None or cache is not parking.cache:
            self.meet(cache)
            parking = self.parking
        if parking is None or cache is not parking.cache or not self._canary.enabled:
            return original(cache, *args, **kwargs)
        if change != "evict":
            return parking.call(change, original, args, kwargs)
        follower = self._followers[id(self._allocator)]
        before = follower.listed()
        result = parking.call(change, original, args, kwargs)
        if self.parking is not None and caches.evicted(result) and follower.listed() == before:
            follower.evicted_waits()
        return result

    def call(self, name: str, original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the function ``name`` of an allocator and reports its effect."""
        follower = self._followers.get(id(allocator))
        if follower is None or not self._canary.enabled:
            return original(allocator, *args, **kwargs)
        # A cleared list can be followed again, whatever happened to it before.
        intact = name == allocators.CLEAR or follower.intact()
        result = original(allocator, *args, **kwargs)
        # As in `Parking.call`.
        try:
            if name == allocators.CLEAR and self.parking is not None:
                self.parking.cleared()
            if not intact or not follower.called(name, self.owners, args, kwargs):
                del self._followers[id(allocator)]
                for region in follower.regions:
                    self._canary.slots.end_lifetime(region)
                self.parking = None
                self._off(follower.regions, f"the free list was changed by something else than {name} and its like")
        except Exception as error:
            self._canary.fail(name, error)
        return result

    def _locks(self, cache: Any) -> CacheLocks | str:
        """The cache's locks, or the reason why parked slots can't be derived from them."""
        refusal = caches.parking_refusal(self._runner)
        locks = cache_locks.locks_of(cache, self._allocator) if refusal is None else refusal
        if isinstance(locks, str):
            return locks
        followed = self._followers.get(id(self._allocator))
        if followed is None or set(followed.regions.values()) != {allocators.page_tokens(self._allocator)}:
            return "slots are numbered in another way than the cache's"
        return locks

    def _lost(self, cache: Any, reason: str) -> None:
        self.parking = None
        self._no_parking(cache, reason, "warning")

    def _no_parking(self, cache: Any, reason: str, level: Level) -> None:
        regions = sorted(name for follower in self._followers.values() for name in follower.regions)
        about = {"regions": regions, "cache": type(cache).__name__, "reason": reason}
        self._canary.tell(Event("parking_off", level, {**about}))

    def _off(self, regions: Collection[str], reason: str) -> None:
        self._canary.tell(Event("lifetime_off", "warning", {"regions": sorted(regions), "reason": reason}))


class Guarded(Protocol):
    """The part of a `Session` used by the hooks."""

    canary: Canary
    lifetime: Lifetime | None


def allocator_hooks(session: Callable[[], Guarded | None]) -> dict[str, Hook]:
    """Hooks for SGLang's functions that change an allocator's list, and for those that show the request. ``session``:
    returns the session of the followed allocator, None if there is none. Imports SGLang."""

    def lifetime(off: bool = False) -> Lifetime | None:
        """``off``: also once Canary is off."""
        guarded = session()
        return guarded.lifetime if guarded is not None and (off or guarded.canary.enabled) else None

    def changing(name: str, original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
        followed = lifetime(off=True)
        call = original if followed is None else partial(followed.call, name, original)
        return call(allocator, *args, **kwargs)

    def parking(change: CacheChange, original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> Any:
        followed = lifetime(off=True)
        if followed is None:
            return original(cache, *args, **kwargs)
        return followed.cache_called(change, original, cache, args, kwargs)

    def preparing(decode: bool, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        followed, prepare = lifetime(), partial(original, batch, *args, **kwargs)
        return followed.owners.preparing(batch, prepare, decode) if followed else prepare()

    def releasing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        followed, request = lifetime(), args[0] if args else kwargs.get("req")
        release = partial(original, *args, **kwargs)
        return followed.owners.releasing(request, release) if followed and request is not None else release()

    functions: dict[str, Callable[..., Any]] = {
        target: partial(changing, target.rpartition(".")[2]) for target in allocators.allocator_functions()
    }
    parks: dict[str, Callable[..., Any]] = {
        target: partial(parking, targets.PARKING[target]) for target in targets.existing(targets.PARKING)
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
