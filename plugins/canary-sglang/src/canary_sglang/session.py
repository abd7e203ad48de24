"""`Session`: one `ModelRunner` under guard, from its pool's allocation on."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from canary_adapters import EmbeddingFilter
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
from canary_sglang.allocator.lifetime import Lifetime
from canary_sglang.batches.draft import DraftBatches
from canary_sglang.batches.forward import ForwardBatches
from canary_sglang.batches.unguarded import UnguardedForwards
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import batches, embeddings, runners
from canary_sglang.compat.state_checkpoints import Checkpoints
from canary_sglang.pools.compressor_state import C128, RequestCompressorStates
from canary_sglang.pools.mamba import MambaStates
from canary_sglang.pools.parts import tensor_bytes
from canary_sglang.pools.pool import SGLangPool
from canary_sglang.pools.window_divergence import WindowDivergence
from canary_sglang.prefix_cache.sweep import PrefixSweep
from canary_sglang.transfer import disaggregation, hicache

MOST_WARM_ROWS = 256
"""Requests of a forward up to which nothing is left to compile when the first one comes."""

Item = TypeVar("Item", Region, Uncovered)


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
        self._filter = EmbeddingFilter(
            partial(embeddings.row, runner.model), partial(embeddings.elsewhere, runner.model), names
        )
        hook_manager().register(self._filter)
        self.canary = Canary(regions, config, writers=self.requests.writers, uncovered=uncovered)
        self._states: MambaStates | None = None
        state = next((region.name for region in regions if region.kind is RegionKind.STATE), None)
        if state is not None:
            self._states = MambaStates(runner.req_to_token_pool, state, self.canary, Checkpoints.of(runner))
        self._compressor = RequestCompressorStates(C128, self.canary) if C128 in names else None
        self._paged = [name for name in names if name not in (state, C128)]
        self.drafts = DraftBatches(runner, self._paged, self.requests)
        self._batches = ForwardBatches(runner, self._paged, self.requests)
        try:
            transfers = _transfers(self)
        except Exception:
            self.close()
            raise
        self.sweep = PrefixSweep(self.canary, int(runner.model_config.vocab_size), partial(_parked, transfers))
        listeners: list[StepListener | None] = [
            self._states,
            self._compressor,
            *transfers,
            self.sweep,
            WindowDivergence(self.canary, runner.req_to_token_pool.req_to_token),
            UnguardedForwards(self.canary, self.forget_slots),
        ]
        for listener in listeners:
            if listener is not None:
                self.canary.step.add(listener)
        alone = self._states is None and self._compressor is None and self.model is None and not transfers
        # Whether nothing but forwards writes to the pool, and to tensors that a batch has on the device.
        self._overlap = Overlap.ALL if alone else Overlap.CHECK
        warm_rows = min(MOST_WARM_ROWS, runners.most_rows(runner))
        self.canary.warm_up(self._padding, warm_rows)
        if self.model is not None:
            self.canary.warm_up(self.drafts.padding, warm_rows)
        # Draft models have the slots of the served one: their Canaries hear nothing of the allocator.
        self.lifetime = Lifetime(runner, self.canary, self.requests) if config.lifetime and not self.model else None

    def notice(self, requests: Sequence[Any]) -> None:
        """`Req` objects of the batch that will be issued next."""
        if self.canary.enabled:
            with self.canary.guard("requests"):
                self.requests.notice(requests)

    def forward(self, original: Callable[[], Any], batch: Any) -> Any:
        """Runs one forward of the engine. Raises `ViolationError` in raise mode."""
        # Without names it is the engine's own warm-up, or within the capture of a graph, where the host may do nothing.
        if batch.rids is None:
            return original()
        # `ModelRunner.forward` makes new tensors for what it changes of a batch. Draft workers don't: see `DraftHooks`.
        overlap, settle = self._overlap, None
        if batches.speculates(batch):
            overlap, settle = Overlap.CHECK, partial(self._forget_tree, batch)
        elif overlap is Overlap.ALL:
            # It may be looked at after it was issued, when the engine has put other tensors into it.
            batch = copy.copy(batch)
        view = partial(self._batches.view, batch)
        return self.canary.step.run(original, view, batch=batch, overlap=overlap, settle=settle)

    def forget_slots(self, slots: Tensor) -> None:
        """Nothing is known any more of these slots of the engine's tables."""
        for name in self._paged:
            self.canary.slots.forget(name, self.canary.regions[name].slots_of(slots))

    def last_words(self) -> None:
        """The engine has failed: reports what the last forwards left behind, if the device can still be read. Raises
        `ViolationError` in raise mode."""
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
        """Drains and ends. Never raises `ViolationError`: what it finds is reported."""
        with contextlib.suppress(ViolationError):
            self.canary.close()
        if hook_manager().is_registered(self._filter):
            hook_manager().unregister(self._filter)

    def _forget_tree(self, batch: Any, view: BatchView, output: Any) -> None:
        """Of a tree that is verified only the reads are sure."""
        if batches.is_tree(batch):
            self.forget_slots(batch.out_cache_loc)

    def _padding(self, rows: int) -> Iterable[BatchView]:
        """As `Canary.warm_up` wants them."""
        views: Iterable[BatchView] = self._batches.padding(rows)
        for tables in (self._compressor, self._states):
            if tables is not None:
                views = [padded for view in views for padded in tables.padding(view)]
        return views


def _transfers(session: Session) -> list[StepListener]:
    """How KV reaches this session's pool without a forward."""
    runner, canary = session.runner, session.canary
    carried = canary.config.transfer_records and session.model is None and runners.records_may_travel(runner)
    ways: list[StepListener] = []
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


def _parked(transfers: Sequence[StepListener]) -> hicache.ParkedRecords | None:
    return next((way.parked("full") for way in transfers if isinstance(way, hicache.HostCache)), None)


def _refusal(runner: Any, pool: SGLangPool) -> str | None:
    """Why KV reaches the pool in a way that can't be followed, None if it does not."""
    refusal = None
    if runners.host_cache(runner) or runners.parks_retracted(runner):
        refusal = hicache.refusal([region.name for region in pool.regions()])
    if refusal is None and runners.disaggregation(runner) == "decode":
        refusal = disaggregation.refusal(pool.regions())
    return refusal


def attach_runner(runner: Any, config: CanaryConfig, requests: RequestWriters | None = None) -> Session | None:
    """A session for ``runner``, whose pool has its memory; None, with an event that says why, where it can't be
    guarded. In raise mode that is an error where the pool or the adapter is at fault. ``requests``: see `Session`."""
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
    """With the model before its name, so that no two sessions of a process have regions of one name."""
    return item if model is None else replace(item, name=f"{model}/{item.name}")
