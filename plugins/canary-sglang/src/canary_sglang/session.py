"""`Session`: one `ModelRunner` under guard, from its pool's allocation on."""

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from canary_core import plugins
from canary_core.batch import BatchView
from canary_core.canary import Canary
from canary_core.config import CanaryConfig
from canary_core.coverage import Coverage
from canary_core.errors import PluginError, ViolationError
from canary_core.events import Event
from canary_core.region import Region, RegionKind, Uncovered
from canary_core.runtime.streams import synchronize
from canary_core.writers import Writers
from canary_sglang.actions.embedding_filter import EmbeddingFilter
from canary_sglang.allocator.lifetime import Lifetime
from canary_sglang.batches.draft import DraftBatches
from canary_sglang.batches.forward import ForwardBatches
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import batches, runners
from canary_sglang.compat.state_checkpoints import Checkpoints
from canary_sglang.pools.compressor_state import C128, RequestCompressorStates
from canary_sglang.pools.mamba import MambaStates
from canary_sglang.pools.parts import tensor_bytes
from canary_sglang.pools.pool import SGLangPool
from canary_sglang.pools.window_divergence import WindowDivergence
from canary_sglang.prefix_cache.sweep import PrefixSweep
from canary_sglang.transfer import disaggregation, hicache
from canary_sglang.transfer.kv_transfer import KVTransfer, region_slots

MOST_WARM_ROWS = 256
"""Requests of a forward up to which nothing is left to compile when the first one comes."""

IDLE_READ_S = 0.5
"""Least time between two reads of the findings while the engine idles: it polls without a pause."""


Item = TypeVar("Item", Region, Uncovered)
Result = TypeVar("Result")


class Session:
    """Brackets every forward of one model, on the stream on which the engine issues it. ``model`` is None for the one
    that is served; of others (draft models) it is the name with which their regions and events begin.

    ``requests``: those of another session of this process, whose forwards are about the same requests.
    In log mode nothing of ours raises into the engine: an exception switches the session off with a ``disabled``
    event. In raise mode a finding is raised out of `ModelRunner.forward`, which ends the engine.
    Raises `AttachError` if the pool does not fit together, `ConfigError` if a setting can't be used.
    """

    def __init__(
        self, runner: Any, pool: SGLangPool, config: CanaryConfig, requests: RequestWriters | None = None
    ) -> None:
        self.runner = runner
        self.model = runners.draft_name(runner)
        regions = [_named(self.model, region) for region in pool.regions()]
        uncovered = [_named(self.model, item) for item in pool.uncovered()]
        self.requests = requests or RequestWriters(Writers(), regions[0].device)
        # The engine may take minutes from here to its first batch, so silence is watched from there; see `hooks`.
        rank = config.rank or runners.rank()
        config = config.model_copy(update={"silence_s": 0.0, "rank": rank, "model": self.model or config.model})
        names = [region.name for region in regions]
        self._vet = EmbeddingFilter(runner.model, names)
        plugins.hook_manager().register(self._vet)
        self.canary = Canary(regions, config, writers=self.requests.writers, uncovered=uncovered)
        state = next((region.name for region in regions if region.kind is RegionKind.STATE), None)
        self._states = None
        if state is not None:
            self._states = MambaStates(runner.req_to_token_pool, state, self.canary, Checkpoints.of(runner))
        self._rings = RequestCompressorStates(C128, self.canary) if C128 in names else None
        self._paged = [name for name in names if name not in (state, C128)]
        self.drafts = DraftBatches(runner, self._paged, self.requests)
        self._batches = ForwardBatches(runner, self._paged, self.requests, self._states, self._rings)
        self.sweep = PrefixSweep(self.canary, int(runner.model_config.vocab_size), self._parked)
        self._divergence = WindowDivergence(self.canary, runner.req_to_token_pool.req_to_token)
        self._inside = False
        # Whether nothing but forwards writes to the pool, and to tensors that a batch has on the device.
        self._alone = self._states is None and self._rings is None and self.model is None
        warm_rows = min(MOST_WARM_ROWS, runners.most_rows(runner))
        self.canary.warm_up(self._batches.padding, warm_rows)
        if self.model is not None:
            self.canary.warm_up(self.drafts.padding, warm_rows)
        self.arrivals: Sequence[KVTransfer] = ()
        # Draft models have the slots of the served one: their Canaries hear nothing of the allocator.
        self.lifetime = Lifetime(runner, self.canary, self.requests) if config.lifetime and not self.model else None
        self._unguarded: set[str] = set()
        self._idle_read = 0.0

    def notice(self, requests: Sequence[Any]) -> None:
        """`Req` objects of the batch that will be issued next."""
        if self.canary.enabled:
            self.guarded("requests", lambda: self.requests.notice(requests))

    def forward(self, original: Callable[[], Any], batch: Any) -> Any:
        """Runs one forward of the engine. Raises `ViolationError` in raise mode."""
        if not self.canary.enabled:
            self._end_arrivals()
        # Without names it is the engine's own warm-up, or within the capture of a graph, where the host may do nothing.
        if not self.canary.enabled or self._inside or batch.rids is None:
            return original()
        # A view may be made in the tensors of the one before.
        self.canary.join(for_good=True)
        alone = self._alone and not self.arrivals and not batches.speculates(batch)
        if alone:
            self.sweep.issue()
        if alone and self.canary.begin_forward():
            # The device has the forward before the host works for us. The engine puts other tensors into its batch.
            batch = copy.copy(batch)
            output = original()
            with self.canary.aside():
                view = self._check(batch)
        else:
            view = self._check(batch)
            output = original()
        self._landed()
        if view is None:
            self._unguarded_forward(batch)
        else:
            if batches.is_tree(batch):
                self.guarded("tree", lambda: self.forget(batch.out_cache_loc))
            self.canary.post_forward(view, beside=alone)
        self.canary.end_step()
        if not self.canary.enabled:
            self._end_arrivals()
        return output

    def _check(self, batch: Any) -> BatchView | None:
        """Checks what a forward reads; gives its view, None where it can't be checked."""
        view = self._arrive(batch, self.guarded("batch", lambda: self._batches.view(batch)))
        self.sweep.issue()
        if view is not None:
            self._divergence.before_forward(batch, view)
            # `ModelRunner.forward` makes new tensors for what it changes of a batch. Draft workers don't: see `around`.
            self.canary.pre_forward(view, beside=True)
        return view

    def launched(self) -> None:
        """A batch was launched, on the scheduler's stream: under the overlap scheduler one of its own, on which it
        writes to the tables of the next batch while this one runs."""
        self.canary.follow_check()

    def around(
        self,
        original: Callable[[], Any],
        view: Callable[[], BatchView],
        settle: Callable[[BatchView, Any], None] | None = None,
    ) -> Any:
        """Runs what is one forward to us, whatever the engine makes of it: several ones, or none. ``settle`` gets the
        view and the output before anything is recorded. Raises `ViolationError` in raise mode."""
        if not self.canary.enabled:
            return original()
        seen = self._arrive(None, self.guarded("batch", view))
        self.sweep.issue()
        if seen is None:
            return original()
        self.canary.pre_forward(seen)
        self._inside = True
        try:
            output = original()
        finally:
            self._inside = False
        self._landed()
        if settle is not None:
            self.guarded("settle", lambda: settle(seen, output))
        self.canary.post_forward(seen)
        self.canary.end_step()
        return output

    def forget(self, slots: Tensor) -> None:
        """Nothing is known any more of these slots of the engine's tables."""
        for name in self._paged:
            self.canary.forget_slots(name, region_slots(self.canary, name, slots))

    def guarded(self, what: str, work: Callable[[], Result]) -> Result | None:
        """Work of ours; None if it failed, which disables the session in log mode."""
        try:
            return work()
        except Exception as error:
            self.canary.fail(f"canary_sglang: {what}", error)
            return None

    def idle(self) -> None:
        """Reports what the last forwards left behind, now and then. Raises `ViolationError` in raise mode."""
        now = time.monotonic()
        if self.canary.enabled and now - self._idle_read >= IDLE_READ_S:
            self._idle_read = now
            # Nothing is in flight, so this stream does for what would wait for the next forward.
            self.guarded("idle", self.canary.settle)
            self.canary.end_step()

    def flushed(self) -> None:
        """The engine has emptied its cache: no slot holds anything any more."""
        if not self.canary.enabled:
            return
        self.guarded("flush", self._clear)

    def last_words(self) -> None:
        """The engine has failed: reports what the last forwards left behind, if the device can still be read. Raises
        `ViolationError` in raise mode."""
        if not self.canary.enabled:
            return
        try:
            synchronize(self.runner.req_to_token_pool.req_to_token.device)
        except Exception as error:
            reason = f"the engine failed, and the device can't be read any more: {error}"
            self.canary.tell(Event("findings_lost", "warning", {"reason": reason}))
            return
        self.canary.drain()

    def close(self) -> None:
        """Drains and ends. Never raises `ViolationError`: what it finds is reported."""
        if self._states is not None:
            self._states.close()
        with contextlib.suppress(ViolationError):
            self.canary.drain()
        self.sweep.finish()
        self._divergence.finish()
        with contextlib.suppress(ViolationError):
            self.canary.close()
        self._end_arrivals()
        if plugins.hook_manager().is_registered(self._vet):
            plugins.hook_manager().unregister(self._vet)

    def _clear(self) -> None:
        for name in self.canary.regions:
            self.canary.clear_slots(name, None)
        for way in self.arrivals:
            way.flushed()

    def _arrive(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """What the forward's slots received since the last one is made known."""
        for way in self.arrivals:
            view = self.guarded(type(way).__name__, partial(way.before, batch, view))
        return view

    def _landed(self) -> None:
        for way in self.arrivals:
            self.guarded(type(way).__name__, way.landed)

    def _end_arrivals(self) -> None:
        ways, self.arrivals = self.arrivals, ()
        for way in ways:
            self.guarded(type(way).__name__, way.ended)

    def _parked(self) -> hicache.ParkedRecords | None:
        return next((way.parked("full") for way in self.arrivals if isinstance(way, hicache.HostCache)), None)

    def _unguarded_forward(self, batch: Any) -> None:
        """A forward that we can't check may have written any of its slots: what was known of them holds no more."""
        mode = batch.forward_mode.name
        slots = batch.out_cache_loc
        if mode in batches.NO_KV_MODES or slots is None or not batch.rids or not self.canary.enabled:
            return
        if mode not in self._unguarded:
            self._unguarded.add(mode)
            reason = "not checked yet; slots that such forwards write are not judged"
            self.canary.tell(Event("unguarded_forward", "warning", {"mode": mode, "reason": reason}))
        self.guarded("unguarded forward", lambda: self.forget(slots))
        if self._states is not None:
            self.guarded("unguarded forward", partial(self._states.forget, batch))
        if self._rings is not None:
            self.guarded("unguarded forward", partial(self._rings.forget, batch.req_pool_indices))
        # With no check before the forward, nothing else lets the allocator's events take effect.
        self.guarded("unguarded forward", self.canary.settle)


def _arrivals(session: Session) -> list[KVTransfer]:
    """How KV reaches this session's pool without a forward."""
    runner, canary = session.runner, session.canary
    carried = canary.config.transfer_records and session.model is None and runners.records_may_travel(runner)
    ways: list[KVTransfer] = []
    if runners.parks_retracted(runner):
        # The last forward of such a request may be in flight when its KV is parked, and its records are not.
        ways.append(hicache.HostCache(canary, runner.token_to_kv_pool, carried=False))
    elif runners.host_cache(runner):
        ways.append(hicache.HostCache(canary, runner.token_to_kv_pool, canary.config.transfer_records))
    if runners.disaggregation(runner) == "decode":
        ways.append(disaggregation.DecodeSide(canary, session.requests, carried))
    elif runners.disaggregation(runner) == "prefill" and carried:
        try:
            ways.append(disaggregation.PrefillSide(canary))
        except PluginError as error:
            # Only what the other engine hears of it is lost.
            canary.tell(Event("records_left_out", "warning", {"reason": str(error)}))
    return ways


def _arrivals_refusal(runner: Any, regions: Sequence[Region]) -> str | None:
    """Why KV reaches a pool of these regions in a way that can't be followed."""
    refusal = None
    if runners.host_cache(runner) or runners.parks_retracted(runner):
        refusal = hicache.refusal([region.name for region in regions])
    if refusal is None and runners.disaggregation(runner) == "decode":
        refusal = disaggregation.refusal(regions)
    return refusal


def attach(runner: Any, config: CanaryConfig, requests: RequestWriters | None = None) -> Session | None:
    """A session for ``runner``, whose pool has its memory; None, with an event that says why, where it can't be
    guarded. In raise mode that is an error where the pool or the adapter is at fault. ``requests``: see `Session`."""
    try:
        model = runners.draft_name(runner)
        refusal = runners.refusal(runner)
        if refusal is not None:
            _tell_uncovered(model, [Uncovered("pool", tensor_bytes(runner.token_to_kv_pool), refusal)])
            return None
        pool = SGLangPool(runner)
        if not pool.regions():
            _tell_uncovered(model, pool.uncovered())
            return None
        refusal = _arrivals_refusal(runner, pool.regions())
        if refusal is not None:
            _tell_uncovered(model, [Uncovered("pool", tensor_bytes(runner.token_to_kv_pool), refusal)])
            return None
        session = Session(runner, pool, config, requests)
        try:
            session.arrivals = _arrivals(session)
        except Exception:
            session.close()
            raise
        return session
    except Exception as error:
        if config.mode == "raise":
            raise
        plugins.emit(Event("disabled", "error", {"where": "attach to sglang", "error": str(error)}))
        return None


def _tell_uncovered(model: str | None, items: Sequence[Uncovered]) -> None:
    event = Coverage((), [_named(model, item) for item in items]).event()
    plugins.emit(event if model is None else replace(event, fields={"model": model, **event.fields}))


def _named(model: str | None, item: Item) -> Item:
    """With the model before its name, so that no two sessions of a process have regions of one name."""
    return item if model is None else replace(item, name=f"{model}/{item.name}")
