"""`Session`: guards one `ModelRunner`, from the allocation of its pool on."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from canary_adapters import EmbeddingFilter, EmbeddingShards, WeightLoads
from canary_core import (
    BatchView,
    Canary,
    CanaryConfig,
    Event,
    Overlap,
    PluginError,
    Region,
    RegionKind,
    StepListener,
    Uncovered,
    ViolationError,
    Writers,
    attach,
    hook_manager,
    report_unguarded,
)
from canary_sglang.actions.recompute import SchedulerRecompute
from canary_sglang.allocator.lifetime import Lifetime
from canary_sglang.batches.draft import DraftBatches
from canary_sglang.batches.forward import ForwardBatches
from canary_sglang.batches.given_tables import GivenTables
from canary_sglang.batches.hits import PrefixHits, tell_unseen_states
from canary_sglang.batches.sampled import SampledRows
from canary_sglang.batches.unguarded import UnguardedForwards
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import batches, embeddings, ranks, runners
from canary_sglang.compat.state_checkpoints import Checkpoints
from canary_sglang.pools.compressor_state import C128, RequestCompressorStates
from canary_sglang.pools.mamba import MambaStates
from canary_sglang.pools.parts import tensor_bytes
from canary_sglang.pools.pool import SGLangPool
from canary_sglang.pools.stores import Stores
from canary_sglang.pools.window_divergence import WindowDivergence
from canary_sglang.prefix_cache.sweep import PrefixSweep
from canary_sglang.transfer import disaggregation, hicache

MOST_WARM_ROWS = 256
"""Kernels for forwards of up to so many requests are compiled before the first forward."""

Item = TypeVar("Item", Region, Uncovered)


class Session:
    """Guards every forward of one model, on the engine's stream for it. ``model``: None for the served model; for a
    draft model its name, the prefix of its regions and events.

    ``requests``: those of another session of the process, with forwards for the same requests; None for the first
    session. In log mode Canary raises nothing into the engine: an exception of its own switches the session off with a
    ``disabled`` event. In raise mode a finding is raised out of `ModelRunner.forward`, which ends the engine. Raises
    `AttachError` if the pool can't be guarded, `ConfigError` if a setting can't be used.
    """

    def __init__(
        self, runner: Any, pool: SGLangPool, config: CanaryConfig, requests: RequestWriters | None = None
    ) -> None:
        self.runner = runner
        self.model = runners.draft_name(runner)
        regions = [_named(self.model, region) for region in pool.regions()]
        uncovered = [_named(self.model, item) for item in pool.uncovered()]
        adapters = runners.disaggregation(runner) == "null"
        self.requests = requests or RequestWriters(Writers(), regions[0].device, adapters)
        # The first batch may come minutes after this, so the watchdog of `Hooks` starts with it instead.
        place = ranks.place(runner)
        # A draft model has the slots of the served one, so only the served one's session follows the allocator.
        lifetime = config.lifetime and not self.model
        about: dict[str, object] = {
            "rank": config.rank or place.rank,
            "replica": config.replica or place.replica,
            "model": self.model or config.model,
            "served_model": config.served_model or runners.served_model(runner),
        }
        config = config.model_copy(update={"silence_s": 0.0, "lifetime": lifetime, **about})
        if not adapters and config.transfer_records and runners.records_may_travel(runner):
            config = config.for_exports("records travel between prefill and decode engines")
        names = [region.name for region in regions]
        part = partial(embeddings.part, runner.model)
        self._shards = EmbeddingShards(part, lambda: self.canary.forwards, self.model or "")
        self._filter = EmbeddingFilter(self._shards.row, self._shards, names, self.requests.embedded)
        self.canary = Canary(
            regions,
            config,
            writers=self.requests.writers,
            uncovered=uncovered,
            pool_tensors=pool.pool_tensors,
            warms_up=True,
        )
        state = next((region.name for region in regions if region.kind is RegionKind.STATE), None)
        self._paged = [name for name in names if name not in (state, C128)]
        self.drafts = DraftBatches(runner, self._paged, self.requests)
        self._batches = ForwardBatches(runner, self._paged, self.requests)
        # A draft model has the slots of the served one.
        self.hits = PrefixHits(self.canary, runner, () if self.model else self._paged)
        # Records of another engine have that one's weights, which are counted there.
        self.weights = WeightLoads(self.canary, runner.model) if adapters else None
        self.sampled = SampledRows(self.canary, self.requests)
        # A draft model's steps have lists of their own.
        self.recompute = None if self.model else SchedulerRecompute(self.canary, runner, self._paged)
        self._given = None if self.model else GivenTables(runner, self.canary, self._paged, self.requests, state)
        # What a verification has stored may be moved, or be a draft's, before it is recorded.
        speculates = self.model is not None or runners.speculates(runner)
        self._stores = None if speculates else Stores(self.canary, runner.token_to_kv_pool)
        try:
            hook_manager().register(self._filter)
            self._listen(state)
            if self.model is None:
                self.canary.sampled.follow()
                if self.canary.step.ranks is not None:
                    self.canary.step.ranks.join(ranks.group(runner))
            # Before the warm-up: what it tells of slots would end a wait for the compiler too early.
            self.lifetime = Lifetime(runner, self.canary, self.requests) if lifetime else None
            self._warm_up()
        except Exception:
            self.close()
            raise

    def notice(self, requests: Sequence[Any]) -> None:
        """Takes the `Req` objects of the next batch."""
        if self.canary.enabled:
            with self.canary.guard("requests"):
                self.requests.notice(requests)

    def forward(self, original: Callable[[], Any], batch: Any) -> Any:
        """Runs one forward of the engine. Raises `ViolationError` in raise mode."""
        # Without names it is the engine's own warm-up, or a graph is being captured, where no host code may run.
        if batch.rids is not None and self.canary.step.ranks is not None:
            self.canary.step.ranks.comes(not batches.speculates(batch))
        if batch.rids is None or not self.canary.enabled:
            return original()
        run = None
        with self.canary.guard("forward"):
            run = self._run(original, batch)
        return original() if run is None else run()

    def _run(self, original: Callable[[], Any], batch: Any) -> Callable[[], Any]:
        """A function that runs the forward of ``batch`` under guard."""
        self._shards.begin()
        self.hits.check()
        self.sampled.forward(batch)
        # `ModelRunner.forward` never writes to a batch's tensors: it replaces them. Draft workers do, see `DraftHooks`.
        overlap, settle = self._overlap, None
        if batches.speculates(batch):
            overlap, settle = Overlap.CHECK, partial(self._forget_tree, batch, self._batches.trees_followed)
        elif overlap is Overlap.ALL:
            # The view may be made after the forward was issued, when the engine has put other tensors into the batch.
            batch = _copied(batch)
            if self.lifetime is not None and self.lifetime.whole:
                # A slot that the last forward has written is written again only after it was given back.
                overlap = Overlap.NEXT
        if batches.has_images(batch):
            # The forward writes to them, see there.
            batch = copy.copy(batch)
            batch.input_ids = batch.input_ids.clone()
        if self._given is not None and self.canary.step.tables.due:
            original = partial(self._given.around, original, batch)
        view = partial(self._batches.view, batch)
        return partial(self.canary.step.run, original, view, batch=batch, overlap=overlap, settle=settle)

    def forget_slots(self, slots: Tensor) -> None:
        """Makes ``slots`` unknown in all regions, numbered as in the engine's tables."""
        for name in self._paged:
            self.canary.slots.forget(name, self.canary.regions[name].slots_of(slots))

    @contextlib.contextmanager
    def following_trees(self) -> Iterator[None]:
        """Context: a verified tree is recorded; the caller reports moves by `carry`, records the accepted path and
        forgets the rest."""
        self._batches.trees_followed = True
        try:
            yield
        finally:
            self._batches.trees_followed = False

    def carry(self, source: Tensor, destination: Tensor) -> None:
        """SGLang copied slots ``source`` to ``destination``, numbered as in its tables, -1 for none: the records go
        along, and the arrived bytes are compared."""
        for name in self._paged:
            region = self.canary.regions[name]
            self.canary.slots.copy(name, region.slots_of(source), region.slots_of(destination), check=True)

    def clear_slots(self, slots: Tensor) -> None:
        """Empties ``slots`` of rejected content. Numbered as in the engine's tables."""
        for name in self._paged:
            own = self.canary.regions[name].slots_of(slots)
            self.canary.slots.clear(name, own)
            # Which token's bytes lie there is not known, so the next write can't be judged to have left them.
            self.canary.slots.forget_bytes(name, own)

    def last_words(self) -> None:
        """Reports findings of the last forwards of a failed engine; if the device can't be read any more, a
        ``findings_lost`` event says so. Raises `ViolationError` in raise mode."""
        if not self.canary.enabled:
            return
        try:
            if self.canary.device.type == "cuda":
                torch.cuda.synchronize(self.canary.device)
        except Exception as error:
            reason = f"the engine failed, and the device can't be read any more: {error}"
            self.canary.tell(Event("findings_lost", "warning", {"reason": reason}))
            return
        self.canary.drain()

    def close(self) -> None:
        """Ends the session. The last findings are reported, and no `ViolationError` is raised."""
        if self.recompute is not None:
            self.recompute.close()
        if self._given is not None:
            self._given.close()
        if self._stores is not None:
            self._stores.close()
        with contextlib.suppress(ViolationError):
            self.canary.close()
        if hook_manager().is_registered(self._filter):
            hook_manager().unregister(self._filter)

    def _listen(self, state: str | None) -> None:
        """Adds the listeners to the step, in the order of their calls. ``state``: the region of recurrent states."""
        runner, step = self.runner, self.canary.step
        self._states: MambaStates | None = None
        if state is not None:
            checkpoints = Checkpoints.of(runner)
            self._states = MambaStates(runner.req_to_token_pool, state, self.canary, checkpoints)
            step.add(self._states)
            if checkpoints is None:
                tell_unseen_states(self.canary, runner)
        self._compressor: RequestCompressorStates | None = None
        if C128 in self.canary.regions:
            self._compressor = RequestCompressorStates(C128, self.canary)
            step.add(self._compressor)
        # Whether only forwards write to guarded slots, and to tensors that a batch has on the device.
        forwards_only = self._states is None and self._compressor is None and self.model is None
        for transfer in _transfers(self):
            step.add(transfer)
            forwards_only = False
        self._overlap = Overlap.ALL if forwards_only else Overlap.CHECK
        self.sweep = PrefixSweep(self.canary, int(runner.model_config.vocab_size), self._parked)
        step.add(self.sweep)
        step.add(WindowDivergence(self.canary, runner.req_to_token_pool.req_to_token))
        self.unguarded = UnguardedForwards(self.canary, self.forget_slots)
        step.add(self.unguarded)

    def _parked(self) -> hicache.ParkedRecords | None:
        """Records of the full pool's copy in host memory, None if there are none."""
        caches = (listener for listener in self.canary.step.listeners if isinstance(listener, hicache.HostCache))
        return next((cache.parked("full") for cache in caches), None)

    def _warm_up(self) -> None:
        rows = min(MOST_WARM_ROWS, runners.most_rows(self.runner))
        beside = runners.captures_graphs(self.runner)
        self.canary.warm_up(self._padding, rows, beside=beside)
        if self.model is not None:
            self.canary.warm_up(self.drafts.padding, rows, beside=beside)

    def _forget_tree(self, batch: Any, followed: bool, view: BatchView, output: Any) -> None:
        """Makes slots written by a verified tree unknown, unless the tree is ``followed``."""
        if not followed and batches.is_tree(batch):
            self.forget_slots(batch.out_cache_loc)

    def _padding(self, rows: int) -> Iterable[BatchView]:
        """Views of padding for `Canary.warm_up`, with the forwards' tables."""
        views: Iterable[BatchView] = self._batches.padding(rows)
        for tables in (self._compressor, self._states):
            if tables is not None:
                views = [padded for view in views for padded in tables.padding(view)]
        return views


def _copied(batch: Any) -> Any:
    """`copy.copy` of a `ForwardBatch`, at a fraction of the cost: there is nothing but attributes."""
    made = object.__new__(type(batch))
    made.__dict__.update(batch.__dict__)
    return made


def _transfers(session: Session) -> Iterator[StepListener]:
    """Listeners for the ways of KV to and from the session's pool without a forward."""
    runner, canary = session.runner, session.canary
    carried = canary.config.transfer_records and session.model is None and runners.records_may_travel(runner)
    if runners.parks_retracted(runner):
        # When SGLang stores the KV of such a request, its last forward may be in flight, and not recorded yet.
        yield hicache.HostCache(canary, runner.token_to_kv_pool, carried=False)
    elif runners.host_cache(runner):
        # Under a draft model's slots lie other tokens than the request's.
        requests = session.requests if session.model is None else None
        yield hicache.HostCache(canary, runner.token_to_kv_pool, canary.config.transfer_records, requests)
    if runners.disaggregation(runner) == "decode":
        yield disaggregation.DecodeSide(canary, session.requests, carried)
    elif runners.disaggregation(runner) == "prefill" and carried:
        try:
            side = disaggregation.PrefillSide(canary)
        except PluginError as error:
            # This engine is still guarded; only the other one gets no records.
            canary.tell(Event("records_left_out", "warning", {"reason": str(error)}))
        else:
            yield side


def _refusal(runner: Any, pool: SGLangPool) -> str | None:
    """Why KV that reaches the pool without a forward can't be followed, None if it can."""
    refusal = None
    if runners.host_cache(runner) or runners.parks_retracted(runner):
        refusal = hicache.refusal([region.name for region in pool.regions()])
    if refusal is None and runners.disaggregation(runner) == "decode":
        refusal = disaggregation.refusal(pool.regions())
    return refusal


def attach_runner(runner: Any, config: CanaryConfig, requests: RequestWriters | None = None) -> Session | None:
    """A session for ``runner``, whose pool must have its memory. None if it can't be guarded; an event has the reason.
    In raise mode an exception while attaching is raised. ``requests``: see `Session`."""
    return attach("attach to sglang", config, partial(_open, runner, config, requests))


def _open(runner: Any, config: CanaryConfig, requests: RequestWriters | None) -> Session | None:
    model = runners.draft_name(runner)
    refusal = runners.refusal(runner)
    pool = None
    if refusal is None:
        pool = SGLangPool(runner)
        if not pool.regions():
            report_unguarded([_named(model, item) for item in pool.uncovered()], model)
            return None
        refusal = _refusal(runner, pool)
    if pool is None or refusal is not None:
        left_out = Uncovered("pool", tensor_bytes(runner.token_to_kv_pool), refusal or "")
        report_unguarded([_named(model, left_out)], model)
        return None
    return Session(runner, pool, config, requests)


def _named(model: str | None, item: Item) -> Item:
    """``item`` with the model's name before its own, so that regions of all sessions have different names."""
    return item if model is None else replace(item, name=f"{model}/{item.name}")
