"""Caches of `generate()` in supported releases: tensors, their positions, and changes of these."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from canary_core import Uncovered, tensors_of

_FULL = ("DynamicLayer", "LinearAttentionAndFullAttentionLayer", "DynamicIndexedLayer", "Fp8QuantizedLayer")
_WINDOW = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
_STATIC_FULL = ("StaticLayer", "LinearAttentionAndStaticFullAttentionLayer", "StaticIndexedLayer")
_STATIC_WINDOW = ("StaticSlidingWindowLayer", "LinearAttentionAndStaticSlidingWindowAttentionLayer")
_KNOWN = {name: name in _STATIC_FULL + _STATIC_WINDOW for name in _FULL + _WINDOW + _STATIC_FULL + _STATIC_WINDOW}
"""Layers with K and V as ``[batch, heads, tokens, dim]``, and whether they write in place."""

_ALL_TOKENS = tuple(name for name in _FULL + _STATIC_FULL if name != "Fp8QuantizedLayer")
"""Layers that keep every token, and know the number only from tensors or a count on the device."""


_STATES = re.compile("conv|recurrent|indexer")
"""Parts of the names of tensors rewritten without slots."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """A layer's way of keeping tokens; layers with the same way share a region.

    ``window_tokens``: a token attends to itself and the ``window_tokens - 1`` before. ``static_tokens``: length of the
    tensors of a static layer, written in place; None for tensors made anew by each forward.
    """

    window_tokens: int | None
    static_tokens: int | None

    def held_after(self, held: int, new: int, recording: bool) -> int:
        """Tokens in a layer after ``new`` more than ``held``."""
        if self.window_tokens is None or (recording and self.static_tokens is None):
            return held + new
        most = self.window_tokens - 1 if self.static_tokens is None else self.static_tokens
        return min(held + new, most)

    def held_after_crop(self, held: int, removed: int) -> int:
        """Tokens in a layer after `Cache.crop`, which also drops tokens passed by the window."""
        left = max(held - removed, 0)
        return left if self.window_tokens is None else min(left, self.window_tokens - 1)


@dataclass(frozen=True, slots=True, eq=False)
class LayerView:
    """One layer's present content: K and V ``[batch, heads, tokens, dim]``, positions ``[end - held, end)`` from index
    0.

    ``end`` is None where only the device knows. ``recording``: the window is not cut until the next crop.
    """

    layer: int
    keeping: Keeping
    keys: Tensor
    values: Tensor
    end: int | None
    held: int
    recording: bool


def guarded(cache: Any) -> Any | None:
    """The cache to guard for ``cache``: an encoder-decoder cache's self-attention half, else the cache itself; None if
    ``cache`` is no `Cache`, or keeps tokens in a way of its own."""
    plain, encoder_decoder = _classes()
    if isinstance(cache, encoder_decoder):
        return guarded(cache.self_attention_cache)
    return cache if isinstance(cache, plain) and type(cache).update is plain.update else None


def cross(cache: Any) -> Any | None:
    """The cross-attention half of an encoder-decoder cache, None where it keeps K and V in a way of its own."""
    plain, encoder_decoder = _classes()
    half = cache.cross_attention_cache if isinstance(cache, encoder_decoder) else None
    return half if isinstance(half, plain) and type(half).update is plain.update else None


def among(values: Iterable[Any]) -> Any | None:
    """The cache among a forward's arguments, or outputs, under any name: releases and models use several. None if none
    is `guarded`."""
    return next((value for value in values if guarded(value) is not None), None)


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a cache of Transformers, of any kind, or a custom one made alike."""
    return isinstance(value, _classes()) or callable(getattr(value, "get_seq_length", None))


@once
def _classes() -> tuple[Any, Any]:
    """Asked several times a forward; importing Transformers is for when a model is there."""
    from transformers.cache_utils import Cache, EncoderDecoderCache

    return Cache, EncoderDecoderCache


def look(cache: Any, wait: bool = False) -> list[LayerView]:
    """Every layer with tokens that can be guarded. ``wait``: may wait for the device to learn static lengths."""
    views = []
    inner = guarded(cache)
    layers = () if inner is None else inner.layers
    counted = _counted(layers) if wait else {}
    for index, layer in enumerate(layers):
        if _reason(inner, layer) is None:
            view = _view(index, layer, counted.get(index))
            if view is not None:
                views.append(view)
    device = views[0].keys.device if views else None
    return [view for view in views if view.keys.device == device]


def keeps_all(cache: Any, views: Sequence[LayerView]) -> bool:
    """Whether ``views`` are all guardable layers of a `guarded` ``cache``, keep every token in one way, and know the
    number only from their tensors."""
    found = {view.layer for view in views}
    if len({view.keeping for view in views}) > 1:
        return False
    return all(
        type(layer).__name__ in _ALL_TOKENS if index in found else _reason(cache, layer) is not None
        for index, layer in enumerate(cache.layers)
    )


def uncovered(cache: Any, looked: Sequence[LayerView]) -> list[Uncovered]:
    """KV memory of ``cache`` left out by `look`, which returned ``looked``, with reasons."""
    inner = guarded(cache)
    if inner is None:
        return [Uncovered(type(cache).__name__, 0, "a cache with an update of its own; its layout is not known")]
    found = []
    views = {view.layer for view in looked}
    for index, layer in enumerate(inner.layers):
        name = f"{type(layer).__name__}.{index}"
        reason = _reason(inner, layer)
        if reason is None and index not in views and _view(index, layer) is not None:
            reason = "on another device than the first layer"
        if reason is not None and type(layer).__name__ != "DummyLayer":
            found.append(Uncovered(name, _bytes(layer, all_tensors=True), reason))
        elif index in views and (rest := _bytes(layer, all_tensors=False)):
            found.append(Uncovered(name, rest, "states or indexer keys beside K and V are rewritten without slots"))
    if inner is not cache and cross(cache) is None:
        size = sum(_bytes(layer, all_tensors=True) for layer in getattr(cache.cross_attention_cache, "layers", ()))
        found.append(Uncovered("cross_attention", size, "a cache with an update of its own; its layout is not known"))
    return found


def pool_tensors(cache: Any) -> dict[str, Tensor]:
    """The present tensors with K and V in guardable layers of ``cache``, by the engine's own names: every one of four
    dimensions in a layer, except known states, whatever the sources say."""
    inner = guarded(cache)
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(() if inner is None else inner.layers):
        if _reason(inner, layer) is None:
            held = tensors_of(layer, lambda name, value: isinstance(value, Tensor) and value.dim() != 4)
            found |= {f"layers[{index}].{name}": t for name, t in held.items() if not _STATES.search(name)}
    return found


def _reason(cache: Any, layer: Any) -> str | None:
    """Why a layer is not guarded, None if it is."""
    name = type(layer).__name__
    if cache.offloading:
        return "an offloaded cache moves between devices during the forward"
    if "Quantized" in name and name not in _KNOWN:
        return "quantized groups are quantized again as they fill up, so bytes of written tokens change"
    if name not in _KNOWN or not type(layer).__module__.startswith("transformers.cache_utils"):
        return "a layer that keeps no token's K and V in a place of its own, or in a way that is not known"
    window = getattr(layer, "sliding_window", None)
    return "a window of one token keeps nothing" if window is not None and window < 2 else None


def _counted(layers: Sequence[Any]) -> dict[int, int]:
    """Lengths counted by layers on a device, by the layer's place: in one wait for all layers there."""
    counts: dict[torch.device, dict[int, Tensor]] = {}
    for index, layer in enumerate(layers):
        count = getattr(layer, "cumulative_length", None)
        if isinstance(count, Tensor) and count.device.type != "cpu":
            counts.setdefault(count.device, {})[index] = count
    lengths: dict[int, int] = {}
    for found in counts.values():
        lengths |= zip(found, torch.stack(list(found.values())).tolist(), strict=True)
    return lengths


def _view(index: int, layer: Any, counted: int | None = None) -> LayerView | None:
    """View of a layer. ``counted``: its tokens by the device's count, if asked."""
    keys, values = _tensors(layer)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4 or keys.numel() == 0:
        return None
    name = type(layer).__name__
    if not _KNOWN[name]:
        window = layer.sliding_window if name in _WINDOW else None
        held = keys.shape[2]
        end = held if name in _FULL and name != "Fp8QuantizedLayer" else int(layer.cumulative_length)
        return LayerView(index, Keeping(window, None), keys, values, end, held, getattr(layer, "record_past", False))
    length = layer.max_cache_len
    if name in _STATIC_WINDOW:
        end = int(layer.cumulative_length_int)
        return LayerView(index, Keeping(length, length), keys, values, end, min(end, length), recording=False)
    end_or_none = int(layer.cumulative_length) if layer.cumulative_length.device.type == "cpu" else counted
    return LayerView(index, Keeping(None, length), keys, values, end_or_none, end_or_none or 0, recording=False)


def _tensors(layer: Any) -> tuple[Any, Any]:
    if type(layer).__name__ != "Fp8QuantizedLayer":
        return layer.keys, layer.values
    # Values with the frozen scale of the first update.
    return tuple(None if q is None else q[0] for q in (layer._quantized_keys, layer._quantized_values))  # type: ignore[return-value]


def _bytes(layer: Any, all_tensors: bool) -> int:
    """Bytes of a layer's tensors; without K and V unless ``all_tensors``."""
    kv = () if all_tensors else _tensors(layer)
    total = 0
    for value in vars(layer).values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for part in parts:
            # Lengths and window sizes are tensors of one element.
            if isinstance(part, torch.Tensor) and part.dim() > 0 and not any(part is tensor for tensor in kv):
                total += part.nbytes
    return total
