"""SGLang's pools by class name, with the places of tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import (
    CHECKED_DTYPES,
    LayerTensors,
    PackedPage,
    PackedPool,
    PagedPool,
    Part,
    RegionPool,
    RowPool,
    packed_page_padding,
    packed_page_source,
    row_source,
)
from canary_core import AttachError, KVSource, PoolAdapter, Region, RegionKind, Role, Uncovered
from canary_sglang.pools.parts import NULL_SLOT, Unguarded, WholePool, model_layers, or_unguarded, tensor_bytes

DSV4_PAGE = (576, 8)
"""Data and scale bytes of a DeepSeek-V4 slot."""
DSA_INDEX = (128, 4)
"""Key and scale bytes of a slot in DSA's indexer."""


def known_pool(name: str, pool: Any, layers: Sequence[int] | None) -> PoolAdapter:
    """An adapter for the pool, chosen by the exact name of its class; `Unguarded` if the class is not known or the pool
    is not as expected. ``layers``: see `model_layers`."""
    kind = type(pool).__name__
    describe = _POOLS.get(kind)
    if describe is None:
        return Unguarded(name, tensor_bytes(pool), f"{kind} is not a pool that this canary-sglang knows")
    return or_unguarded(name, pool, lambda: describe(name, pool, model_layers(pool, layers)))


def compressed_pool(name: str, pool: Any, indexer: Any, layers: Sequence[int], ratio: int) -> RegionPool:
    """One of DeepSeek-V4's compressed pools, with ``ratio`` tokens a slot, and the indexer's keys (None: no indexer),
    with the same slots. Page 0 is padding: no token has its first slot. Raises `AttachError` if a slot has another size
    than expected."""
    sources = tuple(_compressed_sources(pool, indexer, layers))
    slots = min(source.tensor.shape[0] * source.page_size for source in sources)
    region = Region(name, slots, sources, RegionKind.COMPRESSED, null_slot=NULL_SLOT, tokens_per_slot=ratio)
    pages = [(pool.kv_buffer[i], PackedPage(int(pool.page_size), *DSV4_PAGE)) for i, _ in enumerate(layers)]
    if indexer is not None:
        index_page = PackedPage(int(indexer.page_size), *DSA_INDEX)
        pages += [(indexer.index_k_with_scale_buffer[i], index_page) for i, _ in enumerate(layers)]
    return RegionPool(region, [item for buffer, page in pages for item in _beside(name, buffer, page, slots)])


def _beside(name: str, buffer: Tensor, page: PackedPage, slots: int) -> list[Uncovered]:
    """The part of a compressed pool's pages outside of slots."""
    used = -(-slots // page.page_size)
    found = {
        "page padding, holds no KV": packed_page_padding(buffer[:used], page),
        "pages beyond the pool's slots": buffer[used:],
    }
    return [Uncovered(f"{name}/rest", rest.nbytes, reason, rest) for reason, rest in found.items() if rest.nbytes]


def _compressed_sources(pool: Any, indexer: Any, layers: Sequence[int]) -> list[KVSource]:
    _require_dsv4_slot(pool)
    page = PackedPage(int(pool.page_size), *DSV4_PAGE)
    sources = [
        source
        for i, layer in enumerate(layers)
        for source in packed_page_source(pool.kv_buffer[i], Part("kv", layer), page)
    ]
    if indexer is None:
        return sources
    index_page = PackedPage(int(indexer.page_size), *DSA_INDEX)
    if indexer.get_bytes_per_token() != sum(DSA_INDEX):
        raise AttachError(f"{indexer.get_bytes_per_token()} bytes an indexer slot, known are {sum(DSA_INDEX)}")
    for i, layer in enumerate(layers):
        buffer = indexer.index_k_with_scale_buffer[i]
        sources += packed_page_source(buffer, Part("index", layer, role=Role.INDEX), index_page)
    return sources


def _mha(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    arrangement = getattr(pool, "kv_cache_layout", "nhd")
    if arrangement not in ("nhd", "hnd"):
        raise AttachError(f"kv_cache_layout is {arrangement!r}, known are 'nhd' and 'hnd'")
    scaled = all(getattr(pool, f"{half}_scale_buffer", None) is not None for half in "kv")
    tensors = _kv_tensors(pool, layers, scaled, None if scaled else _element_type(pool, pool.k_buffer[0]))
    if arrangement == "hnd":
        return WholePool(name, pool, PagedPool(name, tensors, page_dim=0, slot_dim=2, null_slot=NULL_SLOT))
    return WholePool(name, pool, RowPool(name, tensors, slots=_slots(pool), null_slot=NULL_SLOT))


def _mxfp8(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    """Rows of fp8, and their scales if also rows. For interleaved scales see `mxfp8_scales`."""
    tensors = _kv_tensors(pool, layers, scaled=not pool.mxfp8_sf_interleaved)
    return RowPool(name, tensors, slots=_slots(pool), null_slot=NULL_SLOT)


def _k_only(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    tensors = [LayerTensors(layer, {}, index={"index": pool.k_buffer[i]}) for i, layer in enumerate(layers)]
    return WholePool(name, pool, RowPool(name, tensors, slots=_slots(pool), null_slot=NULL_SLOT))


def _page_major(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    tensors = _kv_tensors(pool, layers, scaled=False, dtype=_element_type(pool, pool.k_buffer[0]))
    return PagedPool(name, tensors, null_slot=NULL_SLOT)


def _mla(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    scales = getattr(pool, "kv_scale_buffer", None)
    tensors = [
        LayerTensors(
            layer,
            {"kv": pool.kv_buffer[i]},
            {} if scales is None else {"kv_scale": scales[i]},
            dtype=None if scales is not None else _element_type(pool, pool.kv_buffer[i]),
        )
        for i, layer in enumerate(layers)
    ]
    return WholePool(name, pool, RowPool(name, tensors, slots=_slots(pool), null_slot=NULL_SLOT))


def _dsa(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    """MLA rows, and the indexer's keys and scales, in pages of their own, with the same slot numbers."""
    packed = bool(getattr(pool, "dsa_kv_cache_store_fp8", False) or getattr(pool, "nsa_kv_cache_store_fp8", False))
    # A packed row holds fp8, scales and bf16 side by side, so it has no single element type.
    dtype = None if packed else _element_type(pool, pool.kv_buffer[0])
    page = PackedPage(int(pool.page_size), *DSA_INDEX)
    sources: list[KVSource] = []
    left_out: list[Uncovered] = []
    slots = _slots(pool)
    for i, layer in enumerate(layers):
        sources.append(row_source(pool.kv_buffer[i], Part("kv", layer, dtype)))
        index = pool.index_k_with_scale_buffer[i]
        if index.shape[0] == 0:
            continue
        if index[0].nbytes == page.used_bytes and index.shape[0] * page.page_size >= slots:
            sources += packed_page_source(index, Part("index", layer, role=Role.INDEX), page)
        else:
            reason = f"indexer pages of {index[0].nbytes} bytes, known are {page.used_bytes}"
            left_out.append(Uncovered(f"{name}/index.{layer}", index.nbytes, reason))
    return RegionPool(Region(name, slots, tuple(sources), null_slot=NULL_SLOT), left_out)


def _require_dsv4_slot(pool: Any) -> None:
    if pool.get_bytes_per_token() != sum(DSV4_PAGE):
        raise AttachError(f"{pool.get_bytes_per_token()} bytes a slot, known are {sum(DSV4_PAGE)}")


def _dsv4(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    _require_dsv4_slot(pool)
    tensors = [LayerTensors(layer, {"kv": pool.kv_buffer[i]}) for i, layer in enumerate(layers)]
    return PackedPool(name, tensors, PackedPage(int(pool.page_size), *DSV4_PAGE), null_slot=NULL_SLOT)


_POOLS: dict[str, Callable[[str, Any, Sequence[int]], PoolAdapter]] = {
    "MHATokenToKVPool": _mha,
    "MHATokenToKVPoolFP4": _mha,
    "MHATokenToKVPoolMXFP8": _mxfp8,
    "MHATokenToKOnlyPool": _k_only,
    "PageMajorMHATokenToKVPool": _page_major,
    "MLATokenToKVPool": _mla,
    "MLATokenToKVPoolFP4": _mla,
    "DSATokenToKVPool": _dsa,
    "NSATokenToKVPool": _dsa,
    "DeepSeekV4SingleKVPool": _dsv4,
}


def _kv_tensors(pool: Any, layers: Sequence[int], scaled: bool, dtype: torch.dtype | None = None) -> list[LayerTensors]:
    """K and V of each layer; if ``scaled``, with the scales of both. ``dtype``: see `LayerTensors`."""
    return [
        LayerTensors(
            layer,
            {"k": pool.k_buffer[i], "v": pool.v_buffer[i]},
            {"k_scale": pool.k_scale_buffer[i], "v_scale": pool.v_scale_buffer[i]} if scaled else {},
            dtype=dtype,
        )
        for i, layer in enumerate(layers)
    ]


def _slots(pool: Any) -> int:
    """Slots of a pool. SGLang adds one page to those handed out: the first one, for padding."""
    return int(pool.size + pool.page_size)


def _element_type(pool: Any, tensor: Tensor) -> torch.dtype | None:
    """Element type of a tensor with fp8 as uint8, given by the pool. None where the tensor's own type is right, or its
    numbers can't be checked."""
    if tensor.dtype.is_floating_point or pool.dtype not in CHECKED_DTYPES or pool.dtype.itemsize != tensor.itemsize:
        return None
    known: torch.dtype = pool.dtype
    return known
