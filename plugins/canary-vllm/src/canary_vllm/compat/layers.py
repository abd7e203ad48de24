"""One attention layer: the cache, and vLLM's own operation for stores there."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_core import AttachError

FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Stores made-up tokens into a cache by the layer's own operation, as a forward does.

    ``halves``: separately stored operands, each with the shape of one token. Raises `AttachError` if the layer has no
    such operation.
    """

    layer: Any
    halves: dict[str, tuple[int, ...]]
    latent: bool

    @classmethod
    def of(cls, layer: Any) -> "Store":
        """The operation of ``layer``."""
        operation = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
        if operation is None:
            raise AttachError(f"{_backend(layer)} has no operation of its own that stores into the cache")
        names = list(inspect.signature(operation).parameters)
        if names[:3] == ["kv_c_normed", "k_pe", "kv_cache"]:
            sizes: dict[str, tuple[int, ...]] = {"kv": (int(layer.kv_lora_rank) + int(layer.qk_rope_head_dim),)}
            return cls(layer, sizes, latent=True)
        if names[:5] == ["layer", "key", "value", "kv_cache", "slot_mapping"]:
            heads, key, value = int(layer.num_kv_heads), int(layer.head_size), int(layer.head_size)
            value = int(getattr(layer, "head_size_v", None) or value)
            return cls(layer, {"k": (heads, key), "v": (heads, value)}, latent=False)
        raise AttachError(f"{_backend(layer)} stores in a way that is not known: ({', '.join(names)})")

    def __call__(self, cache: Tensor, half: str, slots: Tensor, dtype: torch.dtype) -> None:
        """Stores nonzero random numbers as ``half`` of tokens at ``slots`` (int64 ``[n]``) of ``cache``, and zeros as
        everything else; zeros alone with an empty ``half``. ``dtype``: type of the model's activations."""
        shapes, n = self.halves, len(slots)
        made = {name: torch.zeros((n, *shape), dtype=dtype, device=cache.device) for name, shape in shapes.items()}
        if half:
            made[half].uniform_(0.75, 1.5)
        impl = self.layer.impl
        if not self.latent:
            with _scales_in(impl, cache):
                impl.do_kv_cache_update(self.layer, made["k"], made["v"], cache, slots)
            return
        rank = int(self.layer.kv_lora_rank)
        kv, rope = made["kv"][:, :rank].contiguous(), made["kv"][:, None, rank:].contiguous()
        impl.do_kv_cache_update(kv, rope, cache, slots, self.layer.kv_cache_dtype, self.layer._k_scale)

    @property
    def sort(self) -> tuple[object, ...]:
        """Layers of the same sort store alike."""
        return (type(self.layer.impl), self.layer.kv_cache_dtype, *self.halves.items())


@contextmanager
def _scales_in(impl: Any, cache: Tensor) -> Iterator[None]:
    """Context: scales of single tokens, written by a layer through views of its own cache, go to ``cache``."""
    if not getattr(impl, "_is_per_token_head_quant", False):
        yield
        return
    kept = impl._k_scale_cache, impl._v_scale_cache
    impl._k_scale_cache = impl._v_scale_cache = None
    try:
        impl._ensure_scale_caches(cache)
        yield
    finally:
        impl._k_scale_cache, impl._v_scale_cache = kept


def element_type(layer: Any, cache: Tensor) -> torch.dtype | None:
    """Element type of ``cache``, for the check for NaN and infinity; None where the bytes are packed."""
    if cache.dtype == torch.uint8:
        kind = FP8.get(str(getattr(layer, "kv_cache_dtype", "")))
        return getattr(torch, kind) if kind else None
    return cache.dtype if cache.dtype.is_floating_point else None


def scaled_type(layer: Any, chunk_bytes: int) -> torch.dtype | None:
    """Type of a head's numbers in chunks of ``chunk_bytes`` that end with the head's scale, see `KVSource.scaled`; None
    for a layer without scales of single tokens, or in another form."""
    known: dict[str, torch.dtype] = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}
    kind = known.get(str(getattr(layer, "kv_cache_dtype", "")))
    if kind is None or chunk_bytes != int(layer.head_size) + 4:
        return None
    # AMD's fp8 has other numbers.
    return kind if kind == torch.int8 else getattr(layer.impl, "fp8_dtype", kind)


def states(tensors: Sequence[Tensor]) -> Sequence[tuple[str, Tensor]]:
    """The recurrent states of one layer, by half: linear attention has one, all others have a convolution's first."""
    if len(tensors) == 1 and tensors[0].dim() == 4:
        return [("ssm", tensors[0])]
    return list(zip(("conv", "ssm", *(f"state{i}" for i in range(2, len(tensors)))), tensors, strict=False))


def states_refusal(spec: Any, drafted: int) -> str | None:
    """Why recurrent states of a group can't be guarded, None for no reason."""
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode not in ("none", "align"):
        return f"recurrent states are not guarded with mamba_cache_mode={mode}"
    if mode == "align" and getattr(spec, "num_prefill_checkpoint_blocks", 0):
        return "recurrent states are not guarded where a prefill's kernels store some of them for the prefix cache"
    if drafted:
        return "recurrent states are not guarded with speculation, which keeps one for each draft"
    return None


def _backend(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else type(layer).__name__
