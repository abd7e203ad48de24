"""`Session`: guards one model runner, once the KV cache exists."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from canary_adapters import (
    AnswerCheck,
    AttentionCalls,
    BlockLists,
    BlockReplay,
    BlockVerdict,
    DraftForwards,
    EmbeddingFilter,
    EmbeddingShards,
    HeldStates,
    Mark,
    RecomputePairs,
    WatchedScales,
    attention_layers,
    deliver,
    follow_stores,
    kv_scales,
    model_rounding,
    moved_states,
    prepare,
    unabsorbed,
    upload,
)
from canary_core import (
    BatchAdapter,
    BatchView,
    Canary,
    CanaryConfig,
    Event,
    Overlap,
    Patches,
    Uncovered,
    ViolationError,
    Writers,
    attach,
    hook_manager,
    report_unguarded,
)
from canary_vllm.allocator import messages
from canary_vllm.arrivals.loads import Loads
from canary_vllm.batches import sampled
from canary_vllm.batches.encoder import EncoderReads
from canary_vllm.batches.forward import Prepared, V1Batches, V2Batches, padding
from canary_vllm.batches.requests import Requests
from canary_vllm.compat import connectors, embeddings, metadata, runners
from canary_vllm.pools.pool import VLLMPool
from canary_vllm.weights import Weights

MOST_WARM_ROWS = 256
"""Kernels for forwards of up to so many requests are compiled before the first forward."""

WHOSE = ("rank", "replica", "served_model")
"""Settings taken from vLLM's own, unless set by the user."""

_NUMBERS = itertools.count()

UNSEEN = 3
"""Batches in a row without a forward, after which the runner counts as computing in a way of its own."""


class Session:
    """Guards every forward of one runner, on vLLM's stream for it, outside of its CUDA graphs.

    `execute` runs around all of the runner's work for one output of the scheduler; within, `forward` (V1), or
    `prepared` and `begin` (V2), are called when the batch is ready and the forward is issued next. In log mode Canary
    raises nothing into the engine. In raise mode a finding is raised out of `execute`, which ends the engine. Raises
    `AttachError` if the pool can't be guarded, `ConfigError` if a setting can't be used.
    """

    def __init__(self, runner: Any, pool: VLLMPool, config: CanaryConfig) -> None:
        self.runner = runner
        regions = pool.regions()
        self.requests = Requests(Writers(), regions[0].device)
        whose = {name: getattr(config, name) or getattr(runners, name)(runner.vllm_config) for name in WHOSE}
        config = config.model_copy(update={"silence_s": 0.0, **whose})
        self.canary = Canary(
            regions, config, writers=self.requests.writers, uncovered=pool.uncovered(), pool_tensors=pool.pool_tensors,
            warms_up=True,
        )  # fmt: skip
        if self.canary.step.ranks is not None:
            self.canary.step.ranks.join(runners.group(runner.vllm_config))
        self.groups = pool.groups
        """The guarded groups."""
        encoder = [group for group in self.groups if group.holds == "encoder"]
        self._encoder = EncoderReads(self.canary, runner, encoder, self.requests)
        decoder = [group for group in self.groups if group.holds != "encoder"]
        self._v1 = V1Batches(runner, decoder, self.requests)
        self._v2 = V2Batches(decoder, self.requests)
        self._lists = BlockLists(self.canary)
        self._prepared: Prepared | None = None
        self._names: Sequence[str] = ()
        self._issued_first = self._begun = False
        self._unseen = 0
        self._output: Any = None
        self._given: Any = None
        self._number, self._computed = next(_NUMBERS), 0
        self._attention: Any = None
        self._pending: Any = None
        origin = connectors.origin(runner, config.ledger_private)
        drafted = runners.drafted(runner)
        self._tokens = [group for group in self.groups if group.holds == "tokens"]
        self._states = [group for group in self.groups if group.holds == "states" and group.page > 1]
        self._drafts = DraftForwards(self.canary, [g.region for g in self.groups if g.holds == "drafts"], drafted)
        self._patches = Patches(self.canary.guard)
        if len(self._tokens) < len(self.groups) and runners.drafter(runner) is not None:
            run = self._drafts.run
            self._patches.wrap(runners.drafter(runner), "propose", lambda f: lambda *a, **k: run(partial(f, *a, **k)))
        owners = {name: getattr(layer, "impl", None) for name, layer in runners.layers(runner).items()}
        given = {group.region: group.layers for group in self._tokens}
        if origin is None and not runner.vllm_config.parallel_config.use_ubatching:
            # A connector may load into a layer that was stored; halves of a batch store one after the other.
            follow_stores(self._patches, self.canary, "do_kv_cache_update", owners, given)
        model = runner.vllm_config.model_config
        rounding = partial(model_rounding, model.dtype, model.hf_text_config)
        parameters = runner.get_model().named_parameters()
        mla = {name: layer for name, layer in runners.layers(runner).items() if hasattr(layer, "kv_b_proj")}
        attended = cache(partial(attention_layers, model.hf_text_config, parameters, {**owners, **mla}, given))
        quantized = runners.quantized(runner)
        scales = partial(kv_scales, quantized, ("CPUAttentionBackendImpl",))
        # Called with a layer, query, key, value and more, behind the layer's number; MLA is its own layer.
        operands: Any = partial(unabsorbed, attended) if mla else lambda *given, output, **_: (*given[2:5], output)
        calls = AttentionCalls(attended, "forward_impl" if mla else "forward", operands, scales)
        self.recomputed = RecomputePairs(self.canary, self._tokens, rounding, self.requests.blocks.names, calls)
        held = [group for group in self.groups if group.holds == "states" and group.page == 1]
        self.recomputed.states = HeldStates(self.canary, held)
        self.recomputed.whole = runner.vllm_config.parallel_config.world_size == 1
        self.weights = Weights(self.canary, runner, self._patches, self._reloaded)
        self.recomputed.adapters = self.weights.adapters
        self._scales = WatchedScales(self.canary, quantized, runners.SCALES) if quantized else None
        self._loads = None if origin is None else Loads(self.canary, self.groups, self.requests, origin, drafted)
        self.lock = contextlib.nullcontext() if self._loads is None else self._loads.brought.lock
        # A drafter writes to block tables and slot mappings after the forward; a connector writes to slots.
        # What an encoder's states are read for follows the forward, and must know its requests.
        alone = origin is None and not drafted and not encoder
        self._overlap = Overlap.ALL if alone else Overlap.CHECK
        self.lifetime = BlockReplay(self.canary, self.groups, self.requests.writers.id, config.lifetime)
        self._shards = EmbeddingShards(partial(embeddings.part, runner), lambda: self.canary.forwards)
        names = [r.name for r in regions]
        self._filter = EmbeddingFilter(self._shards.row, self._shards, names, self.requests.embedded)
        hook_manager().register(self._filter)
        # Of pipeline stages the last one samples.
        samples = self.canary.sampled.follow() and runners.samples()
        self._answers = AnswerCheck(self.canary, self.requests.writers.known) if samples else None
        rows = min(MOST_WARM_ROWS, int(runner.max_num_reqs))
        graphs = not runner.vllm_config.model_config.enforce_eager
        self.canary.warm_up(
            partial(padding, runner=runner, groups=self.groups, device=self.canary.device), rows, beside=graphs
        )

    def give(self, output: Any) -> None:
        """``output`` of the scheduler has come to the worker, to be computed next."""
        if output is not self._given:
            self._given = output
            if self.canary.step.ranks is not None:
                self.canary.step.ranks.comes(not output.scheduled_spec_decode_tokens)
            self._computed += output.total_num_scheduled_tokens
            # States are rewritten by each forward, and say nothing of how many tokens it had.
            if self._tokens:
                self.canary.witness.computed(output.total_num_scheduled_tokens)

    def gates(self, verdict: BlockVerdict) -> bool:
        """Whether a connector has just brought the block of ``verdict``, and an output names it as failed."""
        return self._loads is not None and self._loads.brought.takes(verdict)

    def leaves(self) -> Callable[[], None] | None:
        """An output leaves the runner, or this process, next. Returns `BlockLoads.late`'s, None without a connector."""
        return None if self._loads is None else self._loads.brought.late()

    @property
    def word(self) -> Mark:
        """Sent with each output of the runner."""
        return self.canary.config.rank, self.canary.enabled, self._number, self._computed

    def execute(self, original: Callable[[], Any], output: Any) -> Any:
        """Runs ``original``, the runner's work for ``output`` of the scheduler. Raises any exception of ``original``,
        and `ViolationError` in raise mode."""
        if output is not self._given:
            # Some of vLLM's executors, and its warm-up, call the runner and pass its worker by.
            with self.canary.guard("give"):
                self.give(output)
        self._given = None
        if not self.canary.enabled:
            return original()
        step = self.canary.step
        # What vLLM makes within it are inference tensors, which can be written to only in this mode.
        with torch.inference_mode():
            # What the side stream still reads is written to next.
            step.join()
            self._shards.begin()
            if self._answers is not None:
                with self.canary.guard("answers"):
                    self._answers.take(messages.answers(output))
            with self.canary.guard("recompute"):
                prepare(output, self.recomputed)
            self._output = self._pending = output
            if self._overlap is not Overlap.ALL or getattr(output, "kv_cache_block_copies", None):
                self._scheduled()
            new = output.scheduled_new_reqs and [request.req_id for request in output.scheduled_new_reqs]
            watched = self.recomputed.attention.forward(new, output.num_scheduled_tokens, lambda: self._names)
            try:
                with watched:
                    result = original()
                if self._issued_first:
                    with step.beside():
                        self._check()
                self._scheduled()
            except BaseException:
                step.abandon()
                raise
            finally:
                self._prepared = self._output = self._attention = None
                begun, self._begun, self._issued_first = self._begun, False, False
            if begun:
                step.after()
                step.end()
                self._encoder.end()
            elif self._unseen < UNSEEN and output.total_num_scheduled_tokens:
                self._unseen += 1
                if self._unseen == UNSEEN:
                    reason = f"batches run, but {type(self.runner).__qualname__} calls nothing that is hooked in vLLM's"
                    self.canary.tell(Event("silence", "error", {"reason": reason}))
            if self._loads is not None:
                self._loads.computed(output)
            with self.canary.guard("recompute"):
                deliver(output, self.recomputed)
        return result

    def _scheduled(self) -> None:
        """Takes the scheduler's message for this step, once: before its forward is checked."""
        output, self._pending = self._pending, None
        if output is None:
            return
        if self._scales is not None and output.scheduled_new_reqs:
            with self.canary.guard("scales"):
                self._scales.look()
        with self.canary.guard("scheduled"):
            message = messages.attached(output)
            self.requests.notice(output, message)
            self._encoder.notice(output)
            given = partial(messages.given, output)
            self.lifetime.replay(message, given)
            if message is not None and self.canary.step.stores.on and len(self.groups) > 1:
                self.lifetime.blocks.handed_out(message.events, given(), [group.number for group in self._tokens])
            if self._loads is not None:
                self._loads.scheduled(output, message)
            copies = getattr(output, "kv_cache_block_copies", None)
            if copies:
                # Blocks that the runner is about to copy: the records go with the bytes.
                self.lifetime.blocks.copied([(int(source), int(destination)) for source, destination in copies])

    def _reloaded(self) -> None:
        """An adapter has another content than before: vLLM may load it for requests of this very batch."""
        if self._output is not None and self._pending is None:
            self.requests.identify()

    def forward(self, original: Callable[[], Any]) -> Any:
        """V1: runs the model."""
        if self._output is None:
            return original()
        self._unseen = UNSEEN
        self._scheduled()
        view = partial(self._view, self._v1, self._output, self.runner.input_batch)
        self._names = self.runner.input_batch.req_ids
        self._encoder.begin()
        result = self.canary.step.run(original, view, overlap=Overlap.CHECK)
        self._encoder.end()
        return result

    def sampled(self, output: Any, about: Any) -> None:
        """The runner has sampled ``output`` for the last forward. ``about``: V1: the drafted tokens; V2: the batch."""
        if self.canary.sampled.followed:
            with self.canary.guard("sampled"):
                v2 = isinstance(output, tuple)
                given = sampled.of_v2(output[0], about) if v2 else sampled.of_v1(self.runner, output, about)
                self.canary.sampled.give(*given)

    def prepared(self, batch: Any, tables: tuple[tuple[Tensor, ...], Tensor]) -> None:
        """V2: ``batch`` and ``tables`` (block tables, slot mappings) are ready for attention."""
        if self._output is not None:
            self._prepared, self._names = Prepared(batch, *tables), batch.req_ids

    def begin(self, attention: Any = None) -> None:
        """V2: the forward of the prepared batch is issued next. ``attention``: the metadata of the layers."""
        self._attention, self._unseen = attention, UNSEEN
        if self._prepared is not None:
            self._encoder.begin(self._prepared)
        self._issued_first = self._prepared is not None and self.canary.step.issues_first(self._overlap)
        if not self._issued_first:
            self._check()

    def _check(self) -> None:
        """V2: checks the reads of the prepared batch."""
        prepared, self._prepared = self._prepared, None
        self._scheduled()
        if prepared is None or not self.canary.enabled:
            return
        with self.canary.guard("view"):
            view = self._view(self._v2, prepared, prepared.batch)
            if view is not None:
                self._begun = True
                self.canary.step.before(view, self._overlap)

    def _view(self, batches: BatchAdapter[Any], batch: Any, inputs: Any) -> BatchView | None:
        view = batches.view(batch)
        if view is not None:
            view = self._drafts.split(view)
            if self._states:
                self._move_states(batch, inputs)
        if view is not None and self.canary.step.tables.due:
            given = [one for g in self._tokens for one in metadata.given(self.runner, self.canary, g, self._attention)]
            self._lists.compare(view, given, lambda g: self.requests.blocks.of(inputs.req_ids[: view.rows], g.group))
        return view

    def _move_states(self, batch: Any, inputs: Any) -> None:
        """For states in the prefix cache: the runner has copied states that go on in another block."""
        names = inputs.req_ids[: int(inputs.num_reqs)]
        if isinstance(batch, Prepared):
            computed, new = inputs.num_computed_tokens_np.tolist(), inputs.num_scheduled_tokens.tolist()
        else:
            computed, new = inputs.num_computed_tokens_cpu.tolist(), [batch.num_scheduled_tokens[n] for n in names]
        for group in self._states:
            held = self.requests.blocks.of(names, group.number)
            pairs = moved_states(group.page, computed[: len(names)], new[: len(names)], held)
            if pairs:
                source, destination = (upload([pair[side] for pair in pairs], self.canary.device) for side in (0, 1))
                self.canary.slots.copy(group.region, source, destination)

    def close(self) -> None:
        """Ends the session. The last findings are reported, and no `ViolationError` is raised."""
        self._patches.undo()
        self.recomputed.close()
        if self._loads is not None:
            self._loads.close()
        with contextlib.suppress(ViolationError), torch.inference_mode():
            self.canary.close()
        if hook_manager().is_registered(self._filter):
            hook_manager().unregister(self._filter)


def attach_runner(runner: Any, config: CanaryConfig) -> Session | None:
    """A session for ``runner``, with its KV cache in place. None if it can't be guarded; an event has the reason.
    In raise mode an exception while attaching is raised."""
    return attach("attach to vllm", config, partial(_open, runner, config))


def _open(runner: Any, config: CanaryConfig) -> Session | None:
    refusal = runners.refusal(runner)
    if refusal is not None:
        tensors = [t for layer in runners.layers(runner).values() for t in runners.layer_tensors(layer)]
        report_unguarded([Uncovered("pool", sum(t.nbytes for t in tensors), refusal)])
        return None
    pool = VLLMPool(runner)
    if not pool.regions():
        report_unguarded(pool.uncovered())
        return None
    return Session(runner, pool, config)
