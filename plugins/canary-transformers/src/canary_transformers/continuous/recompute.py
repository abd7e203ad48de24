"""`ContinuousRecomputer`: computes requests of continuous batching again, with a cache of its own."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import upload
from canary_core import (
    AttentionObserver,
    AttentionRule,
    CachedRequest,
    CanaryError,
    Computed,
    Outline,
    Recomputer,
    Touch,
)  # fmt: skip
from canary_transformers import attention, second_forward
from canary_transformers.continuous import compat

MOST_TOUCHED = 4096
"""Requests whose hits, forks and arrivals are remembered."""


class GaveWayError(Exception):
    """The end of an unwanted second computation: a request came in."""


class ContinuousRecomputer(Recomputer):
    """A forward of the model over a request's tokens with a `DynamicCache` of its own: another path than the engine's,
    which reads pages, decodes, and pads. Layers with a window keep all of their KV there.

    processor: the `ContinuousBatchProcessor`; model: gives the model, None before the first forward.
    """

    def __init__(self, processor: Any, groups: Sequence[compat.KVGroup], model: Callable[[], Any]) -> None:
        self._scheduler = processor.scheduler
        self._cache = processor.cache
        self._groups = [g for g in groups if g.window_tokens is None or compat.keeps_rings(processor.cache)]
        self._device = torch.device(processor.cache.device)
        self._model = model
        self._ranks = getattr(getattr(processor, "distributed_helper", None), "tp_size", 1)
        self._touched: OrderedDict[str, list[Touch]] = OrderedDict()
        self.stops: Callable[[], bool] | None = None
        """Asked before each forward of a second computation. The computation ends with a `GaveWayError` if it stops."""

    def touched(self, request: str, touch: Touch) -> None:
        """Notes that something else than the request's own forwards filled its first slots."""
        self._touched.setdefault(request, []).append(touch)
        self._touched.move_to_end(request)
        if len(self._touched) > MOST_TOUCHED:
            self._touched.popitem(last=False)

    def began(self, request: str) -> None:
        """A new request has this name."""
        self._touched.pop(request, None)

    def touches(self, state: Any) -> tuple[Touch, ...]:
        """Of a request, by its state."""
        touches = list(self._touched.get(state.request_id, ()))
        if state._true_initial_tokens:
            touches.append(Touch("preemption", len(state.initial_tokens)))
        return tuple(touches)

    def requests(self) -> Sequence[str]:
        """The running ones; none before the first forward."""
        if self._model() is None:
            return []
        return [name for name, state in list(self._scheduler.active_requests.items()) if state.position_offset]

    def cached(self, request: str) -> CachedRequest:
        """Of a running request, all tokens known to the host so far."""
        state = self._scheduler.active_requests.get(request)
        if state is None:
            raise CanaryError(
                f"request {request!r} is not running: its blocks belong to nobody any more; verify it before it ends"
            )
        known = [*state.initial_tokens, *state.generated_tokens]
        # With asynchronous batches the token that is computed just now is on the device only.
        count = min(state.position_offset, len(known))
        touches = self.touches(state)
        slots = {group.name: self._slots(group, request, count) for group in self._groups}
        return CachedRequest(request, known[:count], slots, touches)

    def outline(self, request: str) -> Outline:
        """Without its slots."""
        state = self._scheduler.active_requests[request]
        known = len(state.initial_tokens) + len(state.generated_tokens)
        touched = bool(self._touched.get(request)) or bool(state._true_initial_tokens)
        return Outline(min(state.position_offset, known), touched)

    @property
    def pressed(self) -> bool:
        """Whether requests wait for room in a batch or in the cache."""
        return bool(self._scheduler.waiting_requests)

    @property
    def rounding(self) -> float:
        """Of matrix products, whose sums are kept in 32 bits whatever the type of the result."""
        return second_forward.rounding(self._given_model(), self._cache.dtype)

    def attention(self) -> Mapping[int, AttentionRule | str]:
        """By the model's configuration."""
        return attention.rules(self._given_model())

    def compute(
        self, request: CachedRequest, chunk_tokens: int, jitter: float = 0.0, observer: AttentionObserver | None = None
    ) -> Mapping[str, Computed]:
        """With the weights, and the active adapter, of now."""
        model = self._given_model()
        second_forward.require_one_rank(self._ranks)
        backend = str(getattr(model.config.get_text_config(), "_attn_implementation", None))
        if backend.startswith("paged|"):
            raise CanaryError(f"attention {backend!r} makes no causal mask without the engine's cache; use sdpa")
        with attention.observed(model, observer):
            tokens = upload(request.tokens, self._device)
            forwards = self._unless_others(second_forward.parts(len(tokens), chunk_tokens))
            layers = second_forward.run(model, tokens, forwards, jitter)
        slots = torch.arange(len(request.tokens), device=self._device)
        return {
            group.name: Computed(
                tuple(s for one in group.layers for s in second_forward.sources(layers, one.layer)), slots
            )
            for group in self._groups
        }

    def _unless_others(self, forwards: Iterator[slice]) -> Iterator[slice]:
        for part in forwards:
            if self.stops is not None and self.stops():
                raise GaveWayError
            yield part

    def _given_model(self) -> Any:
        model = self._model()
        if model is None:
            raise CanaryError("no forward has run yet, so there is nothing to compare")
        return model

    def _slots(self, group: compat.KVGroup, request: str, count: int) -> Tensor:
        """The group's slot of each of ``count`` positions, -1 where a window has passed."""
        (blocks,) = compat.blocks_of(self._cache, group, [request])
        position = torch.arange(count, device="cpu")
        ring = group.window_tokens
        place = position if ring is None else position % ring
        held = torch.tensor(blocks or [], dtype=torch.int64, device="cpu")
        block = place // group.block_slots
        there = block < len(held)
        if ring is not None:
            there &= position >= count - ring
        slot = held[block[there]] * group.block_slots + place[there] % group.block_slots
        slots = torch.full((count,), -1, dtype=torch.int64, device="cpu")
        slots[there] = slot
        return upload(slots, self._device)
