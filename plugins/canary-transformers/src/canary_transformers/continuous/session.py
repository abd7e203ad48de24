"""`Session`: one cache of continuous batching under guard, from its first forward to its end."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import pluggy
import torch
from torch import Tensor

from canary_adapters import OnStream, WatchedWeights, hits_unchecked, upload
from canary_core import BatchView, Canary, CanaryConfig, Event, Overlap, Patches, ViolationError, Writers
from canary_transformers.continuous import compat
from canary_transformers.continuous.batch import ContinuousBatch, ContinuousForward
from canary_transformers.continuous.pool import PagedCachePool
from canary_transformers.continuous.protection import Protection
from canary_transformers.continuous.tables import GivenTables
from canary_transformers.continuous.tokens import TokenBook
from canary_transformers.continuous.upload import upload_lists
from canary_transformers.continuous.verifier import Verifier
from canary_transformers.filters import EarlierBytesFilter

HAS_NEW_TOKEN = attrgetter("has_new_token")
NOTHING = contextlib.nullcontext()


@dataclass(slots=True)
class _Change:
    """Blocks of one group in one change, and the responsible request's writer id for each."""

    event: compat.Ownership
    group: int
    blocks: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)


class Session:
    """Guards one `ContinuousBatchProcessor`: brackets its forwards and follows its blocks.

    The engine calls in from its own thread, one call at a time. In log mode nothing here raises into the engine: an
    exception switches the session off with a ``disabled`` event. All work goes to the engine's compute stream, in the
    order of the engine's own.

    ``fresh``: the cache was just made, so that reading a slot before a write is a finding. Raises `AttachError` if the
    processor or its cache is not as `compat` expects, `ConfigError` if a setting can't be used.
    """

    def __init__(self, processor: Any, config: CanaryConfig, hooks: pluggy.PluginManager, fresh: bool) -> None:
        compat.require_methods(processor)
        cache = processor.cache
        self.hooks = hooks
        self._io = processor.inputs_and_outputs
        self._device = torch.device(cache.device)
        self._groups = compat.kv_groups(cache)
        windows = [group.window_tokens for group in self._groups]
        # A ring keeps the last tokens of a longer query.
        self._kept_of_a_query = None if None in windows else max(w for w in windows if w is not None)
        self._changes: list[_Change] = []
        # Records of blocks that are in host memory, by request and group.
        self._away: dict[tuple[str, int], Tensor] = {}
        self._stepping = False
        self._streams = torch.get_device_module(self._device)
        asynchronous = compat.asynchronous(self._io)
        self._lists_are_late = self._io.compute_stream is not None and not asynchronous
        # An asynchronous engine writes each batch's tokens within its forward, and the next one's beside it.
        beside = not asynchronous and compat.tells_inputs(self._io)
        self._overlap = Overlap.ALL if beside else Overlap.NONE
        self._on_stream = OnStream(None if self._device.type == "cpu" else self._io.compute_stream)
        self._raises = config.mode == "raise"
        self._ended = False
        self._given: tuple[Tensor | None, int, Tensor | None] | None = None
        self._written: torch.cuda.Event | None = None
        if self._device.type != "cpu":
            self._streams.synchronize(self._device)
        with self._on_stream:
            writers = Writers()
            pool = PagedCachePool(cache)
            regions = pool.regions()
            self.canary = Canary(
                regions,
                config,
                hooks=hooks,
                writers=writers,
                uncovered=pool.uncovered(),
                pool_tensors=pool.pool_tensors,
            )
            budget = max(sum(region.pool_bytes for region in regions) // 1000, 16 << 20)
            self.canary.sampled.follow()
            self._writers = writers
            self._batch = ContinuousBatch(self._groups, writers, self._device, TokenBook(self._device, budget))
            self._tables = GivenTables(self.canary, cache, self._groups)
            if not (fresh and compat.cleared(cache)):
                hooks.register(EarlierBytesFilter())
                for group in self._groups:
                    self.canary.slots.forget(group.name, None)
        self._batch.begins = self._look
        self._weights: WatchedWeights | None = None
        self._model: Any = None
        # The last forward known to have run with the weights of the last look, and whether one began a request since.
        self._same, self._begun, self._told = 0, False, False
        self._patches = Patches()
        if hasattr(cache, "prepare_fork_request"):
            self._patches.follow(cache, "prepare_fork_request", self._forked)
        self._patches.wrap(processor.model_runner, "compute_batch", self._bracket)
        self._patches.follow(processor, "prepare_next_batch", self._scheduled)
        self.verifier = Verifier(self.canary, processor, self._groups, lambda: self._model and self._model())
        """Computes requests again, where somebody asks for it."""
        self.verifier.follow(self._patches, self._on_stream)
        if self.canary.step.stores.on:
            self._patches.follow(cache, "update", self._updated)
        compat.watch_blocks(processor, self, self._patches)
        # Blocks that requests came to share since the last forward, by group.
        self._hits: dict[int, dict[int, None]] = {}
        self._check_hits = self._follows_hits(cache)
        self._protect(processor)
        if beside:
            compat.watch_inputs(self._io, self._inputs_change, self._patches)

    def step(self, original: Callable[[], None]) -> None:
        """Runs one generation step of the engine. Raises `ViolationError` in raise mode."""
        self._stepping, self._ended = True, False
        try:
            original()
        finally:
            self._stepping = False
        if not self._ended:
            with self._on_stream:
                self.canary.step.end()
        if not self.canary.enabled:
            # Nothing is told to Canary any more, so nothing needs to be heard.
            self._patches.undo()

    def drain(self) -> None:
        """Reports everything found so far; the engine's thread must not be in a step. Raises `ViolationError` in raise
        mode."""
        with self._on_stream:
            self.canary.drain()
        missing = self.canary.witness.settle()
        if missing is not None:
            self.canary.tell(missing)

    def close(self) -> None:
        """Drains, and restores the engine's methods. Never raises `ViolationError`."""
        self._patches.undo()
        self.verifier.close()
        with contextlib.suppress(ViolationError), self._on_stream:
            self.canary.close()

    def moving(self) -> None:
        """Ends reads of bytes beside the move."""
        with self._ours("a copy"):
            self.canary.step.join()

    def copied(self, group: int | None, source: Sequence[int], destination: Sequence[int]) -> None:
        """A fork: records go where the bytes went, and the bytes are compared."""
        with self._ours("copy"):
            for g in self._of(group):
                copies = self._slots(g, destination)
                self.canary.slots.copy(g.name, self._slots(g, source), copies)
                self.canary.slots.check(g.name, copies)

    def arrived(self, group: int | None, blocks: Sequence[int]) -> None:
        """Content without records: not judged until rewritten."""
        with self._ours("arrival"):
            for g in self._of(group):
                if blocks:
                    self.canary.slots.forget(g.name, self._slots(g, blocks))

    def left(self, group: int, blocks: Sequence[int], request: str) -> None:
        """Keeps the records of blocks on their way to host memory."""
        with self._ours("offload"):
            for g in self._of(group):
                if blocks:
                    self._away[request, g.index] = self.canary.slots.export_records(g.name, self._slots(g, blocks))

    def returned(self, group: int, blocks: Sequence[int], request: str) -> None:
        """Blocks came back from host memory: their bytes are compared with those that left. Unseen leavers are not
        judged."""
        with self._ours("restore"):
            for g in self._of(group):
                payload = self._away.pop((request, g.index), None)
                if not blocks:
                    continue
                slots = self._slots(g, blocks)
                self.verifier.arrived(request, len(slots))
                if payload is None:
                    self.canary.slots.forget(g.name, slots)
                    continue
                back = min(len(payload), len(slots))
                self.canary.slots.import_records(g.name, slots[:back], payload[:back])
                self.canary.slots.check(g.name, slots[:back])

    def dropped(self, request: str) -> None:
        """Drops the records of blocks in host memory."""
        for group in self._groups:
            self._away.pop((request, group.index), None)

    def changed_hands(
        self, event: compat.Ownership, group: int, blocks: Sequence[int], request: str | None = None
    ) -> None:
        """Kept on the host until the next thing that is issued to the device; changes of one sort in a row are one."""
        if not blocks or not self.canary.enabled:
            return
        with self.canary.guard("canary_transformers: ownership"):
            if event == "share" and self._check_hits:
                self._hits.setdefault(group, {}).update(dict.fromkeys(blocks))
            if not self._changes:
                self.canary.slots.defer(self._tell_changes)
            last = self._changes[-1] if self._changes else None
            if last is None or (last.event, last.group) != (event, group):
                self._changes.append(last := _Change(event, group))
            last.blocks += blocks
            last.writers += [-1 if request is None else self._writers.id(request)] * len(blocks)

    def emptied(self) -> None:
        """The pool was reset: earlier holders of blocks do not matter any more."""
        with self._ours("reset"):
            self._changes.clear()
            self._hits.clear()
            self._away.clear()
            for g in self._groups:
                self.canary.slots.clear(g.name, None)

    def _bracket(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def compute_batch(model: Any, batch_data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if not (self._stepping and self.canary.enabled):
                # The engine warms up through the same function; there it reads slots that nobody has written.
                self.moving()
                original(model, batch_data, *args, **kwargs)
                return
            self._model = ref(model)
            if self._weights is None:
                self._look()
            with self._on_stream:
                if self._hits:
                    self._compare_hits()
                first = self.canary.step.issues_first(self._overlap)
            followed = not first and self._check(batch_data, Overlap.NONE)
            try:
                original(model, batch_data, *args, **kwargs)
            except BaseException:
                self.canary.step.abandon()
                raise
            if first:
                # The device has the forward, and the engine waits for it as soon as we are done.
                followed = self._check(batch_data, self._overlap)
            with self._on_stream:
                self._after(followed)

        return compute_batch

    def _scheduled(self, ready: bool) -> None:
        """The engine has scheduled a batch to compute next, whether or not it calls the hooked functions."""
        if ready:
            most = self._kept_of_a_query
            queries = (state.query_length for state in compat.requests(self._io))
            self.canary.witness.computed(sum(queries if most is None else (min(query, most) for query in queries)))

    def _check(self, arguments: dict[str, Any], overlap: Overlap) -> bool:
        """Checks the forward's reads, beside it if ``overlap`` allows; returns whether the forward is followed at
        all."""
        step, inputs = self.canary.step, self._inputs_written()
        with self._on_stream, step.beside() if overlap is not Overlap.NONE else NOTHING:
            with self.canary.guard("canary_transformers: inputs"):
                if inputs is not None:
                    inputs.wait(self._streams.current_stream(self._device))
            view = self._view(arguments)
            if view is not None:
                step.before(view, overlap)
        return view is not None

    def _compare_hits(self) -> None:
        """Compares the bytes of all blocks that requests came to share, before a forward reads them."""
        hits, self._hits = self._hits, {}
        with self.canary.guard("canary_transformers: hits"):
            for group in self._groups:
                blocks = list(hits.get(group.index, ()))
                if blocks:
                    self.canary.count("hit_blocks", len(blocks))
                    self.canary.slots.check(group.name, upload(blocks, self._device), page_slots=group.block_slots)

    def _follows_hits(self, cache: Any) -> bool:
        """Whether bytes of prefix hits can be compared, where they are to be."""
        silent = "this Transformers does not tell which blocks are shared; install 5.18 or later"
        untold = hits_unchecked(self.canary.config, None if hasattr(cache, "cache_allocators") else silent)
        if untold is not None:
            self.canary.tell(untold)
        return self.canary.config.hit_check and untold is None

    def _protect(self, processor: Any) -> None:
        """Acts on findings, as set by ``CANARY_ON_VIOLATION``. In raise mode the engine stops instead."""
        mode = self.canary.config.on_violation
        if mode == "report" or self._raises:
            return
        reason = compat.unable_to_act(processor)
        if reason is not None:
            self.canary.tell(Event("quarantine_failed", "error", {"reason": reason}))
            return
        protection = Protection(processor, mode, self._groups, self.canary)
        protection.follow(self._patches)
        self.hooks.register(protection)

    def _after(self, followed: bool) -> None:
        """The forward was issued: records its writes, if it was checked. In log mode the step ends here for Canary: the
        engine has still to wait for the device."""
        step = self.canary.step
        if self._begun:
            # What this forward has computed is of the same weights.
            self._look()
            self._begun = False
        if followed:
            step.after()
            with self.canary.guard("canary_transformers: sampled"):
                self._give_sampled()
        else:
            step.abandon()
        if not self._raises:
            self._ended = True
            step.end()

    def _look(self) -> None:
        """Looks whether somebody has changed the weights since the last look."""
        with self.canary.guard("canary_transformers: weights"):
            model = self._model()
            weights = self._weights
            if weights is None:
                weights = self._weights = WatchedWeights(model)
                self.canary.guard_weights(model, resume=True)
                if weights.unwatched:
                    self._left_out(f"{weights.unwatched} parameters have no version counter or no memory to read")
            elif weights.look():
                self.canary.step.weights_changed("in place", since=self._same)
            elif weights.gave_up and not self._told:
                self._left_out("parameters move with every request, as with offloading")
            self._same, self._begun = self.canary.forwards, True

    def _left_out(self, why: str) -> None:
        self._told = True
        self.canary.tell(
            Event("weights_unwatched", "info", {"reason": f"{why}: changes of weights are not looked for"})
        )

    def _forked(self, forked: Any, original: Any, *args: Any, **kwargs: Any) -> None:
        if self.canary.enabled and original is not None:
            self._batch.forked(original, list(forked or ()))

    def _inputs_written(self) -> torch.cuda.Event | None:
        """Event to wait for before the check. Without asynchronous batches the engine writes its lists on the caller's
        stream, and its own stream does not wait for the caller's: long before a forward reads the lists, but the check
        may come first. Asynchronous lists come by a copy awaited by the engine's own stream, which must not wait for
        more because of Canary."""
        if not self._lists_are_late:
            return None
        with self.canary.guard("canary_transformers: inputs"):
            if self._written is None:
                self._written = self._streams.Event()
            self._written.record(self._streams.current_stream(self._device))
        return self._written

    def _inputs_change(self) -> None:
        """The engine is about to write the next inputs, on the current stream, to tensors possibly read by the
        record."""
        self.canary.step.join()

    def _updated(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """A layer's K and V were given to the cache."""
        layer = compat.stored_layer(args, kwargs)
        if layer is not None and self._stepping:
            with self._ours("stored"):
                self.canary.step.stored(layer)

    def _give_sampled(self) -> None:
        """Gives the tokens sampled for the batch: the next one's input, never on the host in time for an asynchronous
        engine."""
        requests = compat.requests(self._io)
        count = sum(map(HAS_NEW_TOKEN, requests))
        tokens = self._sampled(count)
        if tokens is None or not count:
            return
        if count < len(requests):
            (rows,) = upload_lists([[row for row, r in enumerate(requests) if r.has_new_token]], self._device)
            tokens = tokens.new_full((len(requests),), -1).index_copy_(0, rows, tokens)
        self.canary.sampled.give(tokens)

    def _sampled(self, count: int) -> Tensor | None:
        """The first ``count`` tokens sampled for the batch, in the same place for most batches."""
        output = compat.sampled(self._io)
        if self._given is None or self._given[0] is not output or self._given[1] != count:
            # Of two dimensions, it has the tokens' probabilities beside them.
            tokens = None if output is None else output[0, :count] if output.dim() == 2 else output[:count]
            self._given = output, count, tokens
        return self._given[2]

    def _view(self, arguments: dict[str, Any]) -> BatchView | None:
        view = None
        with self.canary.guard("canary_transformers: batch"):
            requests = compat.requests(self._io)
            view = self._batch.view(ContinuousForward(requests, arguments))
            if view is not None and self.canary.step.tables.due:
                self._tables.compare(view, [request.state.request_id for request in requests], arguments)
        return view

    def _tell_changes(self) -> None:
        changes, self._changes = self._changes, []
        names = {g.index: g for g in self._groups}
        for change in changes:
            blocks, writers = upload_lists([change.blocks, change.writers], self._device)
            group, tell = names[change.group], getattr(self.canary.slots, change.event)
            tell(group.name, blocks, partial(writers.to, torch.int32), group.block_slots)
            if change.event == "alloc" and self.canary.step.stores.on and len(self._groups) > 1:
                # Groups take turns on the same memory.
                self.canary.slots.adopt_bytes(group.name, self._slots(group, change.blocks))

    def _of(self, group: int | None) -> Sequence[compat.KVGroup]:
        return [g for g in self._groups if group is None or g.index == group]

    def _slots(self, group: compat.KVGroup, blocks: Sequence[int]) -> Tensor:
        """All slots of ``blocks``, int64 ``[n * block_slots]``."""
        first = upload(blocks, self._device) * group.block_slots
        return (first[:, None] + torch.arange(group.block_slots, device=self._device)).flatten()

    @contextlib.contextmanager
    def _ours(self, where: str) -> Iterator[None]:
        """Context for code of Canary within a call of the engine: on its stream, with exceptions handled here."""
        with self.canary.guard(f"canary_transformers: {where}"), self._on_stream:
            yield
