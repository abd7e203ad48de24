"""A second forward of a model over tokens of one sequence, with a cache of Canary's own: for all recomputers."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from canary_adapters import model_rounding
from canary_core import CanaryError, KVSource
from canary_transformers import recurrent
from canary_transformers.generate.hooks import GENERATE

GROWING_ROPES = ("dynamic", "longrope")
"""Kinds of rotation that a model changes as sequences grow, so that a forward of Canary's would change the next one."""


MOST_DECODES, LARGE_CHUNK = 48, 512
"""Most forwards of one token, at the end of a sequence; tokens of one before these."""


def parts(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """So many tokens, in forwards of ``chunk_tokens``; of 1: after larger ones for all but the last tokens."""
    large = max(tokens - MOST_DECODES, 0) if chunk_tokens == 1 else 0
    yield from (slice(first, min(first + LARGE_CHUNK, large)) for first in range(0, large, LARGE_CHUNK))
    yield from (slice(first, first + chunk_tokens) for first in range(large, tokens, chunk_tokens))


def run(model: Any, tokens: Tensor, forwards: Iterable[slice], jitter: float, first_position: int = 0) -> Sequence[Any]:
    """The layers of a cache that holds ``tokens``, integer ``[n]``, at positions from ``first_position`` on; computed
    in ``forwards``, each with its part of them. See `Recomputer.compute` for ``jitter``. Raises `CanaryError` where a
    model would notice."""
    if found := sorted({*_ropes(model.config.get_text_config())} & {*GROWING_ROPES}):
        raise CanaryError(
            f"a rotation of kind {found[0]!r} is changed by each longer sequence, so it can't be repeated"
        )
    inner = model.base_model
    config = model.config if recurrent.keeps_states(model) else None
    own = torch.Generator(tokens.device).manual_seed(0)
    roundings = recurrent.Roundings(own) if jitter and config is not None else None
    cache = _cache(config, jitter, own, roundings)
    named: dict[str, Any] = {cache_argument(inner): cache, "use_cache": True}
    positions = torch.arange(first_position, first_position + len(tokens), device=tokens.device)[None]
    # Some hybrid models count the positions of each call anew, unless they are given.
    gives = "position_ids" in inspect.signature(inner.forward).parameters
    with GENERATE.apart(), torch.no_grad():
        for part in forwards:
            if first_position or (config is not None and gives):
                named["position_ids"] = positions[:, part]
            with roundings or nullcontext():
                inner(input_ids=tokens[None, part], **named)
            if roundings is not None:
                roundings.end()
                roundings.stored(cache.layers)
    layers: Sequence[Any] = cache.layers
    return layers


def sources(layers: Sequence[Any], layer: int) -> list[KVSource]:
    """K and V of a layer of the cache, ``[1, heads, tokens, dim]``: one chunk for each head. Empty without
    such a layer."""
    if layer >= len(layers) or getattr(layers[layer], "keys", None) is None:
        return []
    return [_source(layers[layer].keys, "k", layer), _source(layers[layer].values, "v", layer)]


def rounding(model: Any, dtype: torch.dtype) -> float:
    """See `Recomputer.rounding`: of matrix products, whose sums are kept in 32 bits whatever the type of the result."""
    return model_rounding(dtype, model.config.get_text_config())


def require_one_rank(ranks: int) -> None:
    """Raises `CanaryError` for a model on several ranks."""
    if ranks > 1:
        raise CanaryError("the model runs on ranks of tensor parallelism, which would have to recompute together")


def cache_argument(model: Any) -> str:
    """Name of the cache among the arguments of a forward, which differs by release."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _cache(config: Any, jitter: float, own: torch.Generator, roundings: recurrent.Roundings | None) -> Any:
    """A cache that keeps all KV, and states where a model's ``config`` is given. Attention is given numbers with
    ``jitter``, and ``roundings`` are within layers with states."""
    from transformers import DynamicCache

    given = {} if config is None else {"config": config}
    if not jitter:
        return DynamicCache(**given)

    class Jittery(DynamicCache):
        """Rounds the KV that attention reads, and keeps the computed KV."""

        def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            """See `DynamicCache.update`."""
            if roundings is not None:
                roundings.end()
            keys, values = super().update(*args, **kwargs)
            return recurrent.jittered(keys, jitter, own), recurrent.jittered(values, jitter, own)

        def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
            """See `DynamicCache.get_conv_state`: a recurrent layer begins."""
            if roundings is not None:
                roundings.begin()
            return super().get_conv_state(*args, **kwargs)

        def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
            """See `DynamicCache.update_conv_state`."""
            if roundings is not None:
                roundings.begin()
            return super().update_conv_state(*args, **kwargs)

        def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
            """See `DynamicCache.update_recurrent_state`."""
            if roundings is not None:
                roundings.end()
            return super().update_recurrent_state(*args, **kwargs)

    return Jittery(**given)


def _source(tensor: Tensor, half: str, layer: int) -> KVSource:
    _, heads, tokens, dim = tensor.shape
    row = dim * tensor.element_size()
    return KVSource(
        tensor.contiguous(), half, layer, chunk_bytes=row, slot_stride_bytes=row, chunks=heads,
        chunk_stride_bytes=tokens * row, dtype=tensor.dtype,
    )  # fmt: skip


def _ropes(config: Any) -> list[str]:
    """Kinds of rotation by a model's configuration, one for all layers or for each type of layers."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    alike = [given, *(one for one in given.values() if isinstance(one, Mapping))]
    return [str(one.get("rope_type") or one.get("type")) for one in alike]
