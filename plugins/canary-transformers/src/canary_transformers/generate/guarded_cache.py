"""`GuardedCache`: one cache of `generate()` under guard, from the first forward to the end."""

import contextlib
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import pluggy
import torch
from torch import Tensor

from canary_core import Canary, CanaryConfig, Event, Level, ViolationError, Witness, Writers, emit
from canary_transformers.errors import WithheldError
from canary_transformers.filters import MovedBytesFilter
from canary_transformers.generate import caches
from canary_transformers.generate.caches import LayerView
from canary_transformers.generate.forward import ModelCall
from canary_transformers.generate.given import Given
from canary_transformers.generate.groups import disagreeing, groups_of
from canary_transformers.generate.records import CacheRecords
from canary_transformers.generate.steady import Steady
from canary_transformers.generate.verdicts import Verdicts

if TYPE_CHECKING:
    from canary_transformers.generate.verifier import CacheVerifier


class GuardedCache:
    """Follows one `Cache`: `before`, then `after` or `failed` for each forward; `changing`, then `reordered`,
    `repeated`, `cropped` or `cleared` for its methods' changes in between.

    In log mode nothing here raises into the engine: an exception switches the guard off with a ``disabled`` event.
    `before`, `after`, `drain` and `close` raise `ViolationError` in raise mode. Where layers do not hold the tokens
    left by those methods, slots still read by attention are findings (UNWRITTEN), and an event names the layers.

    ``witness``: tokens of the cache's model. ``pad``: the token with a zero embedding, if there is one.
    """

    _full = "full"
    """Name of the region of layers that keep all tokens."""

    def __init__(
        self,
        name: str,
        config: CanaryConfig,
        hooks: pluggy.PluginManager,
        witness: Witness | None = None,
        pad: int | None = None,
    ) -> None:
        self.name = name
        self.hooks = hooks
        hooks.register(MovedBytesFilter())
        self._verdicts = Verdicts()
        hooks.register(self._verdicts)
        # A cache has its slots for itself: there is no allocator to follow.
        self._config = config.model_copy(update={"lifetime": False, "audit": 0})
        # Not from a Canary's beginning: until its first forward ends a cache has no tensors.
        self._audited_forwards = config.audit
        self._pad = pad
        self._witness = Witness() if witness is None else witness
        self._writers = Writers()
        # None until the first forward has ended; others take their place whenever the cache outgrows them.
        self._records: CacheRecords | None = None
        # None where the cache must be looked at as a whole.
        self._steady: Steady | None = None
        self._ended: Tally[str] = Tally()
        self._cache: Callable[[], Any] = _nothing
        self.model: Callable[[], Any] = _nothing
        """Gives the model whose weights are compared."""
        self.given = Given()
        self.verifier: CacheVerifier | None = None
        """Has rows of the cache computed again; None where nobody can."""
        self.thread = threading.current_thread()
        """That of the last forward."""
        self._over = config.mode == "off"
        self._was_empty = True
        # Of a forward that is issued before it is checked: how many tokens each group will hold after it.
        self._held: dict[str, int] | None = None

    def stats(self) -> dict[str, int]:
        """`Canary.stats`, summed over all Canaries of the cache."""
        total = Tally(self._ended)
        if self._records is not None:
            total.update(self._records.canary.stats())
        return dict(total)

    def before(self, cache: Any, forward: ModelCall) -> None:
        """Checks the forward's reads, or leaves them to `after`, once the device has the forward: for writes in place
        to lasting tensors, without a change since the last forward."""
        self._held = None
        with self._ours("before the forward"):
            if self._over or self._check_steady(cache, forward):
                return
            records, views = self._records, self._look(cache)
            self._steady = None
            if records is None:
                self._was_empty = all(view.end == 0 for view in views)
            elif disagree := disagreeing(views, records.groups, records.end):
                self._changed(records, views, disagree)
            elif forward.rows != records.rows:
                self._release(f"{records.rows} rows were given {forward.rows} rows of tokens")
            else:
                held = records.held_after(views, forward.new)
                if records.have_room(held):
                    records.rebind(views)
                else:
                    records = self._replace(records.rebuilt(views, self.hooks, held=held))
                records.check(forward, held)

    def after(self, cache: Any, forward: ModelCall) -> None:
        """The forward was issued: records its writes, then reports."""
        with self._ours("after the forward"):
            if self._over:
                self._witness.explain("released_cache", forward.rows * forward.new)
                return
            records, held, self._held = self._records, self._held, None
            if records is not None and held is not None:
                records.check(forward, held)
            if records is None:
                self._attach(cache, forward)
            elif records.checked is not None and not (self._steady and self._steady.record(cache, records, forward)):
                self._record(cache, records, forward)
            if self._records is not None:
                self.thread = threading.current_thread()
                self.given.took(forward, self._records.end)
                self._records.canary.step.end()

    def failed(self) -> None:
        """The forward raised: nothing is recorded."""
        self._held = None
        with self._ours("failed forward"):
            if self._records is not None:
                self._records.abandon()

    def changing(self, moves: bool) -> None:
        """A method of the cache is about to change it: ends reads beside the change. ``moves``: rows change places, for
        which growing layers make other tensors."""
        with self._ours("a change of the cache"):
            records = self._live()
            if records is not None:
                records.canary.step.join()
                if moves:
                    records.let_go_growing()
                    self._steady = None

    def reordered(self, cache: Any, rows: Tensor) -> None:
        """The cache's row ``i`` is now its former row ``rows[i]``; there may be more rows than before, or fewer."""
        with self._ours("rows"):
            records = self._live()
            if records is None or records.end == 0:
                return
            self.given.moved(rows)
            rows = rows.to(records.canary.device, torch.int64).flatten()
            if len(rows) == records.rows:
                records.reorder(rows)
                if records.audited:
                    records.rebind(self._look(cache))
            else:
                self._replace(records.rebuilt(self._look(cache), self.hooks, rows))

    def repeated(self, cache: Any, times: int) -> None:
        """Each row of the cache is there ``times`` times now, one after the other."""
        records = self._live()
        if records is not None:
            self.reordered(cache, torch.arange(records.rows).repeat_interleave(int(times)))

    def cropped(self, tokens_to_remove: int) -> None:
        """`Cache.crop`: as many tokens were removed, as a negative number; a positive one is the number left."""
        with self._ours("crop"):
            records = self._live()
            if records is not None:
                end = int(tokens_to_remove) if tokens_to_remove > 0 else records.end + int(tokens_to_remove)
                records.crop(max(end, 0))
                self.given.cropped(records.end)

    def cleared(self) -> None:
        """Nothing is left; lasting tensors are zeroed."""
        with self._ours("reset"):
            records = self._live()
            if records is not None:
                records.clear()
                self.given = Given()

    def compare(self, cache: Any) -> None:
        """Compares the bytes of all that the cache holds, if ``CANARY_HIT_CHECK`` is on: where `generate()` goes on
        from the cache, and, with ``CANARY_ON_VIOLATION=protect``, before its answer is returned."""
        with self._ours("comparison"):
            records = self._live() if self._config.hit_check and self._config.bytes != "off" else None
            if records is None:
                return
            views = self._look(cache)
            if views and views[0].keys.shape[0] == records.rows and not disagreeing(views, records.groups, records.end):
                records.compare(views)

    def present(self) -> tuple[CacheRecords, Sequence[Any]] | None:
        """The records between two forwards, bound to the present tensors, and the cache's layers. None where these hold
        something else than forwards and methods have left, or nothing."""
        with self._ours("a look"):
            records, cache = self._live(), self._cache()
            views = self._look(cache) if records is not None else []
            if records is None or not views or views[0].keys.shape[0] != records.rows:
                return None
            if not disagreeing(views, records.groups, records.end):
                records.rebind(views)
                return records, cache.layers
        return None

    def outline(self) -> tuple[int, int]:
        """Rows, and tokens of each; without a look at the cache."""
        records = self._live()
        return (0, 0) if records is None else (records.rows, records.end)

    def let_pass(self) -> None:
        """Findings are told, and nothing else is done about them."""
        self.hooks.unregister(self._verdicts)

    def withheld(self) -> WithheldError | None:
        """The error for the caller in the place of what was computed from KV found to be wrong since the last call."""
        return self._verdicts.take()

    def drain(self) -> None:
        """Reports everything found so far; waits for the device. Raises `ViolationError` in raise mode."""
        with self._ours("drain"):
            records = self._live()
            if records is not None:
                records.canary.drain()

    def close(self) -> None:
        """The cache is gone, or the guard. Raises `ViolationError` in raise mode; again: does nothing."""
        with self._ours("close"):
            self._over = True
            self._retire()
        if self.verifier is not None:
            self.verifier.close()

    def _look(self, cache: Any, wait: bool = False) -> list[LayerView]:
        """See `caches.look`."""
        return caches.look(cache, wait)

    def _check_steady(self, cache: Any, forward: ModelCall) -> bool:
        """`before` without a change since the last forward; returns whether the case applies."""
        records, steady = self._records, self._steady
        held = None if records is None or steady is None else steady.held_after(cache, records, forward)
        if records is None or steady is None or held is None:
            return False
        if not steady.growing and records.issues_first():
            self._held = held
            return True
        if records.compares_reads and not steady.in_place():
            return False
        records.check(forward, held)
        steady.let_go()
        return True

    def _live(self) -> CacheRecords | None:
        return None if self._over else self._records

    def _attach(self, cache: Any, forward: ModelCall) -> None:
        """Begins with the present bytes: the forward's writes, and, unjudged, older content."""
        views = self._look(cache, wait=True)
        end = views[0].end if views else None
        left_out = caches.uncovered(cache, views)
        if not views or end is None:
            self._over = bool(left_out)
            self._witness.explain("uncovered_cache", forward.rows * forward.new)
            if left_out:
                listed = [{"name": u.name, "bytes": u.size_bytes, "reason": u.reason} for u in left_out]
                self._tell("coverage", "warning", {"cache": self.name, "coverage_ratio": 0.0, "uncovered": listed})
            return
        rows = views[0].keys.shape[0]
        groups = groups_of(views, end, self._full)
        if rows != forward.rows or not 0 < forward.new <= end or disagreeing(views, groups, end):
            self._release(f"{rows} rows of {end} tokens do not fit the forward's {forward.rows} rows of {forward.new}")
            return
        regions = [group.region(views) for group in groups]
        self._cache = ref(caches.guarded(cache))
        if not self._was_empty:
            self.given.give_up("its cache held tokens before Canary followed it")
        canary = Canary(
            regions,
            self._config,
            hooks=self.hooks,
            writers=self._writers,
            uncovered=left_out,
            witness=self._witness,
        )
        self._records = CacheRecords(self.name, canary, groups, end, self._pad)
        if end > forward.new:
            self._tell("adopted", "info", {"cache": self.name, "tokens": rows * (end - forward.new)})
            self._witness.computed(rows * (end - forward.new))
        self._records.adopt(forward, self._was_empty)
        self._audit(self._records, self._audited_forwards)
        self._take_up(self._records)
        self._settle(cache, views, self._records)

    def _record(self, cache: Any, records: CacheRecords, forward: ModelCall) -> None:
        views = self._look(cache)
        if forward.new and {view.end for view in views} == {records.end}:
            records.abandon(views)  # a model that was told not to use its cache
            self._witness.explain("unused_cache", forward.rows * forward.new)
        elif {view.layer for view in views} != records.layers:
            # Layers that other forwards of this model leave alone.
            self._retire()
            self._was_empty = False
            self._attach(cache, forward)
        else:
            records.record(views, forward)
            self._settle(cache, views, records)

    def _settle(self, cache: Any, views: Sequence[LayerView], records: CacheRecords) -> None:
        """All layers hold the right tokens: from now on most forwards change little."""
        one = len(records.groups) == 1 and records.groups[0].layers == tuple(view.layer for view in views)
        off = disagreeing(views, records.groups, records.end)
        self._steady = Steady.of(cache, views, records.end) if one and not off else None

    def _changed(self, records: CacheRecords, views: Sequence[LayerView], disagree: dict[int, int]) -> None:
        """Not all layers hold the right tokens: reports them, and checks the coming reads. ``disagree``: the layers
        concerned, with the length of their sequences."""
        ends = {view.end or 0 for view in views if view.end is not None}
        together = len(ends) == 1
        fields: dict[str, object] = {"cache": self.name, "expected_tokens": records.end, "layer_tokens": disagree}
        if together and max(ends) < records.end:
            fields["reason"] = "every layer was changed by something else than the methods of Cache"
            self._tell("cache_changed", "warning", fields)
        else:
            fields["reason"] = "layers hold more tokens than they should, or not the same ones"
            self._tell("cache_layers_disagree", "error", fields)
            records.check_beyond(disagree)
        self._retire()
        self._was_empty = False
        self._over = not together

    def _replace(self, records: CacheRecords) -> CacheRecords:
        left, cache = self._records.canary.audit.left if self._records is not None else 0, self._cache
        self._retire()
        self._records, self._cache = records, cache
        self._audit(records, left)
        self._take_up(records)
        return records

    def _take_up(self, records: CacheRecords) -> None:
        """The model's weights are compared from now on; of several caches in turn, the next one goes on. Rows can be
        verified."""
        records.canary.verifier = self.verifier
        model = self.model()
        if model is not None:
            records.canary.guard_weights(model, resume=True)

    def _audit(self, records: CacheRecords, forwards: int) -> None:
        """The next ``forwards`` forwards are audited."""
        if forwards:
            canary = records.canary
            canary.audit.start(self._pool_tensors, tuple(canary.regions.values()), canary.uncovered, forwards)

    def _release(self, reason: str) -> None:
        """Lets go of a cache that can't be followed any more."""
        self._over = True
        self._tell("cache_released", "error", {"cache": self.name, "reason": reason})
        self._retire()

    def _pool_tensors(self) -> Mapping[str, Tensor]:
        """The engine's own tensors, for the audit; once the cache is gone, the last known ones."""
        cache = self._cache()
        if cache is None and self._records is not None:
            return {source.name: source.tensor for group in self._records.groups for source in group.bound}
        return caches.pool_tensors(cache)

    def _retire(self) -> None:
        self._cache = _nothing
        records, self._records, self._steady = self._records, None, None
        if records is not None:
            try:
                records.close()
            finally:
                self._ended.update(records.canary.stats())

    def _tell(self, name: str, level: Level, fields: dict[str, object]) -> None:
        emit(Event(name, level, fields), self.hooks)

    @contextlib.contextmanager
    def _ours(self, where: str) -> Iterator[None]:
        """Code of ours within a call of the engine: no gradients, and its exceptions are ours to handle. Not
        `Canary.guard`: there may be no Canary yet, or another one at the end."""
        was_over = self._over
        try:
            if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                # Records are updated in place for longer than the engine's own inference mode may last.
                with torch.inference_mode(False), torch.no_grad():
                    yield
            else:
                yield
        except ViolationError:
            raise
        except Exception as error:
            self._failed(f"canary_transformers: {where}", error)
        if not was_over and self._records is not None and not self._records.canary.enabled:
            self._over, self._steady = True, None
            self._records.let_go()

    def _failed(self, where: str, error: Exception) -> None:
        self._over = True
        if self._records is not None:
            self._records.canary.fail(where, error)
        elif self._config.mode == "raise":
            raise error
        else:
            self._tell("disabled", "error", {"where": where, "error": repr(error)})


def _nothing() -> None:
    """An unknown cache, or one gone."""
