"""`CacheRecomputer`: computes rows of the caches of a model again, in `generate()` and direct calls."""

import copy
import inspect
import threading
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pluggy
import torch
from torch import Tensor

from canary_adapters import upload
from canary_core import (
    AttentionObserver,
    AttentionRule,
    CachedRequest,
    Canary,
    CanaryConfig,
    CanaryError,
    Computed,
    Event,
    KVSource,
    Outline,
    Recomputer,
    Region,
    Violation,
    Writers,
    emit,
)  # fmt: skip
from canary_transformers import attention, recurrent, second_forward
from canary_transformers.generate.given import Span
from canary_transformers.generate.groups import Group
from canary_transformers.generate.guarded_cache import GuardedCache
from canary_transformers.generate.records import CacheRecords

KINDS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
"""Layers of caches whose KV follows from tokens alone."""

CHANGED = "its cache was changed by something else than its methods, or is gone"


class CacheRecomputer(Recomputer):
    """A forward of the model over a row's tokens, without padding, with a `DynamicCache` of Canary's own.

    Also the host of the `Recompute` of a model, for all caches: caches come and go, and noise, turns and shares stay.

    hooks: gives those of a model. caches: those of the model. ranks: that have a shard of the model each.
    """

    def __init__(
        self, model: Callable[[], Any], config: CanaryConfig, hooks: Callable[[Any], pluggy.PluginManager],
        caches: Callable[[], Sequence[GuardedCache]], ranks: int,
    ) -> None:  # fmt: skip
        self.config = config
        self.verifier: Any = self
        self.counts: Tally[str] = Tally()
        """Of rows of caches that have ended."""
        self._model = model
        self._hooks = hooks
        self._caches = caches
        self._ranks = ranks
        self._records: CacheRecords | None = None
        self._span = Span(0, 0, 0)
        self._states: dict[str, Any] = {}

    def requests(self) -> Sequence[str]:
        """The rows of the caches of this thread."""
        here = [cache for cache in self._caches() if cache.thread is threading.current_thread()]
        return [name for cache in here for name in self.rows(cache)]

    def rows(self, cache: GuardedCache) -> list[str]:
        """Names of the rows of a cache that holds something."""
        rows, tokens = cache.outline()
        return [f"{cache.name} row {row}" for row in range(rows if tokens else 0)]

    def outline(self, request: str) -> Outline:
        """By the host's count."""
        cache, _ = self._of(request)
        return Outline(cache.outline()[1], cache.given.touch is not None)

    def cached(self, request: str) -> CachedRequest:
        """Of a row between two forwards. Padding has no slots."""
        self._records = None
        cache, row = self._of(request)
        found = cache.present()
        if found is None or row >= found[0].rows:
            raise CanaryError(CHANGED)
        self._records, layers = found
        records = self._records
        self._require_fit(layers)
        self._span = span = cache.given.span(row, records.end)
        if span.position != 0 or span.first:
            self._require_positions(cache, span)
        tokens = self._tokens(cache, records, row)
        if min(tokens[span.first : span.end]) < 0:
            raise CanaryError("not all of its tokens are known")
        self._states = {group.name: _bound(records.canary, group.name, group.bound) for group in records.groups}
        slots = {group.name: self._slots(group, row, records) for group in records.groups}
        if span.end == records.end:
            # Both computations end at the same token.
            first = records.groups[0].name
            for name, region in recurrent.regions(layers, row).items():
                self._states[name] = _bound(records.canary, first, region.sources, region)
                slots[name] = torch.arange(region.slots, device=records.canary.device)
        touch = cache.given.touch
        touches = [] if touch is None else [touch]
        return CachedRequest(request, tokens[: span.end], slots, touches)

    @property
    def recurrent(self) -> bool:
        """By the model's caches."""
        return recurrent.keeps_states(self._given_model())

    @property
    def rounding(self) -> float:
        """By the type of the first layer's keys."""
        records = self._records
        dtype = None if records is None else records.groups[0].bound[0].dtype
        return second_forward.rounding(self._given_model(), dtype or torch.float32)

    def attention(self) -> Mapping[int, AttentionRule | str]:
        """By the model's configuration."""
        return attention.rules(self._given_model())

    def compute(
        self, request: CachedRequest, chunk_tokens: int, jitter: float = 0.0, observer: AttentionObserver | None = None
    ) -> Mapping[str, Computed]:
        """With the weights of now."""
        model, records, span = self._given_model(), self._records, self._span
        if records is None:
            raise CanaryError(CHANGED)
        device = records.canary.device
        ids = upload(request.tokens[span.first :], device)
        # Positions behind padding are others than those that a look at attention counts.
        with attention.observed(model, None if span.first else observer):
            forwards = second_forward.parts(len(ids), chunk_tokens)
            layers = second_forward.run(model, ids, forwards, jitter, span.position)
        slots = torch.arange(-span.first, len(ids), device=device).clamp(min=-1)
        computed = {
            group.name: Computed(tuple(s for n in group.layers for s in second_forward.sources(layers, n)), slots)
            for group in records.groups
        }
        for name, region in recurrent.regions(layers, 0).items():
            computed[name] = Computed.within(region, torch.arange(region.slots, device=device))
        return computed

    @property
    def states(self) -> Mapping[str, Any]:
        """Device memory by region of the present cache, with sources at the present place."""
        return self._states

    @property
    def slots(self) -> Any:
        """Comparison of bytes beside forwards, in the present cache."""
        return self._canary.slots

    @property
    def writers(self) -> Writers:
        """Names of requests, in the present cache."""
        return self._canary.writers

    @property
    def backend(self) -> str:
        """Name of the running ops."""
        return self._canary.backend

    @property
    def forwards(self) -> int:
        """Number of forwards that began with the present cache."""
        return self._canary.forwards

    def report(self, violations: Sequence[Violation]) -> int:
        """See `Canary.report`."""
        return self._canary.report(violations)

    def count(self, name: str, number: int = 1) -> None:
        """With the numbers of the present cache, else with those of the model."""
        if self._records is None:
            self.counts[name] += number
        else:
            self._records.canary.count(name, number)

    def tell(self, event: Event) -> None:
        """Hands an event to every plugin."""
        if self._records is not None:
            self._records.canary.tell(event)
        elif (model := self._model()) is not None:
            emit(event, self._hooks(model))

    def doubt(self, name: str, reason: str) -> None:
        """Adds a doubt to the coverage of the present cache."""
        self._canary.doubt(name, reason)

    def done(self) -> None:
        """Nothing is looked at any more."""
        self._records = None
        self._states = {}

    @property
    def _canary(self) -> Canary:
        if self._records is None:
            raise CanaryError(CHANGED)
        return self._records.canary

    def _of(self, request: str) -> tuple[GuardedCache, int]:
        name, _, row = request.rpartition(" row ")
        for cache in self._caches():
            if cache.name == name and row.isdigit():
                return cache, int(row)
        raise CanaryError(f"{request!r} is no row of a cache that is guarded and alive")

    def _given_model(self) -> Any:
        model = self._model()
        if model is None:
            raise CanaryError("the model is gone")
        return model

    def _require_fit(self, layers: Sequence[Any]) -> None:
        """Raises `CanaryError` with the reason for which the model can't compute rows of a cache with these layers."""
        model = self._given_model()
        second_forward.require_one_rank(self._ranks)
        if model.training:
            raise CanaryError("the model is in training mode")
        if getattr(model, "peft_config", None) is not None:
            raise CanaryError("the model has adapters of PEFT, and which ones a forward ran with is not followed")
        if model.config.is_encoder_decoder:
            raise CanaryError("its KV depends on states of an encoder")
        kinds = {type(layer).__name__ for layer in layers}
        odd = kinds - {*KINDS, *recurrent.LAYERS}
        if kinds & {*recurrent.LAYERS} and (why := recurrent.refusal(model)) is not None:
            raise CanaryError(why)
        if odd:
            raise CanaryError(f"it has layers of type {', '.join(sorted(odd))}, which keep more than KV of tokens")
        if torch.is_autocast_enabled(self._canary.device.type):
            raise CanaryError("autocast is on; verify outside of it")

    def _require_positions(self, cache: GuardedCache, span: Span) -> None:
        """Raises `CanaryError` if a model can't be told where a row begins: behind padding, or not at position 0."""
        inner = self._given_model().base_model
        if "position_ids" not in inspect.signature(inner.forward).parameters:
            raise CanaryError("it has padding, and the model's forward takes no position_ids")
        if cache.given.counts_pads and not hasattr(inner, "rotary_emb"):
            raise CanaryError("it has padding, and how the model counts it without position_ids is not known")

    def _tokens(self, cache: GuardedCache, records: CacheRecords, row: int) -> list[int]:
        """By the records of layers that keep all; else by the sequences of `generate()`."""
        whole = next((group for group in records.groups if not group.first), None)
        if whole is not None:
            one = torch.tensor([row], device=records.canary.device)
            known = records.canary.slots.tokens(whole.name, whole.slots(range(records.end), one))
        elif cache.given.history is not None and cache.given.history.shape[1] == records.end:
            known = cache.given.history[row]
        else:
            raise CanaryError("its first tokens are passed by all windows, and no longer known")
        return [int(token) for token in known.tolist()]

    def _slots(self, group: Group, row: int, records: CacheRecords) -> Tensor:
        """Of positions up to the span's end: -1 for padding, and where a window has passed."""
        position = torch.arange(self._span.end, device=records.canary.device)
        there = (position >= max(group.first, self._span.first)) & (position < group.end)
        return torch.where(there, row * group.capacity + position - group.first, -1)


def _bound(canary: Canary, name: str, sources: tuple[KVSource, ...], region: Region | None = None) -> Any:
    """A region's state, with sources at their present place; or (``region``) the same memory of ops for another one."""
    state = copy.copy(canary.states[name])
    state.region = replace(region or state.region, sources=sources)
    return state
