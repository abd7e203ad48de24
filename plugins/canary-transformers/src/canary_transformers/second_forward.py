"""A second forward of a model over tokens of one sequence, with a cache of Canary's own: for all recomputers."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import model_rounding
from canary_core import CanaryError, KVSource
from canary_transformers.generate.hooks import GENERATE

GROWING_ROPES = ("dynamic", "longrope")
"""Kinds of rotation that a model changes as sequences grow, so that a forward of Canary's would change the next one."""


def parts(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """So many tokens, in forwards of ``chunk_tokens``."""
    return (slice(first, first + chunk_tokens) for first in range(0, tokens, chunk_tokens))


def run(model: Any, tokens: Tensor, forwards: Iterable[slice], jitter: float, first_position: int = 0) -> Sequence[Any]:
    """The layers of a cache that holds ``tokens``, integer ``[n]``, at positions from ``first_position`` on; computed
    in ``forwards``, each with its part of them. See `Recomputer.compute` for ``jitter``. Raises `CanaryError` where a
    model would notice."""
    if found := sorted({*_ropes(model.config.get_text_config())} & {*GROWING_ROPES}):
        raise CanaryError(
            f"a rotation of kind {found[0]!r} is changed by each longer sequence, so it can't be repeated"
        )
    inner = model.base_model
    cache = _cache(jitter, tokens.device)
    named: dict[str, Any] = {cache_argument(inner): cache, "use_cache": True}
    positions = torch.arange(first_position, first_position + len(tokens), device=tokens.device)[None]
    with GENERATE.apart(), torch.no_grad():
        for part in forwards:
            if first_position:
                named["position_ids"] = positions[:, part]
            inner(input_ids=tokens[None, part], **named)
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


def _cache(jitter: float, device: torch.device) -> Any:
    """A cache that keeps all KV, and gives attention numbers with ``jitter``."""
    from transformers import DynamicCache

    if not jitter:
        return DynamicCache()
    own = torch.Generator(device).manual_seed(0)

    class Jittery(DynamicCache):
        """Rounds the KV that attention reads, and keeps the computed KV."""

        def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            """See `DynamicCache.update`."""
            keys, values = super().update(*args, **kwargs)
            return _jittered(keys, jitter, own), _jittered(values, jitter, own)

    return Jittery()


def _jittered(numbers: Tensor, jitter: float, own: torch.Generator) -> Tensor:
    random = 2 * torch.rand(numbers.shape, generator=own, device=numbers.device) - 1
    # In 32 bits, where a factor so near to 1 can be written.
    return (numbers.float() * (1 + jitter * random)).to(numbers.dtype)


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
