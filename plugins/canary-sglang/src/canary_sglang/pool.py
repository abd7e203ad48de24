"""An SGLang pool as regions: what is known is guarded, what isn't is named with the reason."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_adapters import (
    CHECKED_DTYPES,
    JoinedPools,
    LayerTensors,
    PackedPage,
    PackedPool,
    PagedPool,
    Part,
    RowPool,
    WindowPool,
    packed_page_source,
    require_disjoint,
    row_source,
)
from canary_core.adapters import PoolAdapter
from canary_core.errors import AttachError
from canary_core.region import KVSource, Region, RegionKind, Role, Uncovered
from canary_sglang import layout, states

NULL_SLOT = 0
"""Where SGLang sends padded tokens; in a full → window map it means evicted."""

DSV4_PAGE = (576, 8)
"""Data and scale bytes of a DeepSeek-V4 slot."""
DSA_INDEX = (128, 4)
"""Key and scale bytes of a slot in DSA's indexer."""


class SGLangPool(PoolAdapter):
    """The pool of one `ModelRunner`, after it was allocated. Regions are named ``full``, ``swa``,
    ``c4`` and ``c128``.

    Pools are recognised by the exact name of their class, since a subclass may lay its tensors out in another way.
    """

    def __init__(self, runner: Any) -> None:
        self._pool = runner.token_to_kv_pool
        self._requests = getattr(runner, "req_to_token_pool", None)
        self._is_draft = bool(getattr(runner, "is_draft_worker", False))
        self._window_tokens = layout.window_tokens(runner)
        self._joined = JoinedPools([*self._parts(), *self._states()])

    def regions(self) -> Sequence[Region]:
        """None if nothing of the pool is known; then `uncovered` says why."""
        return self._joined.regions()

    def uncovered(self) -> Sequence[Uncovered]:
        """What the regions leave out."""
        return self._joined.uncovered()

    def _parts(self) -> list[PoolAdapter]:
        pool, kind = self._pool, type(self._pool).__name__
        if kind == "SWAKVPool":
            full, window = _layers_of(pool.layers_mapping)
            return [
                *self._full(pool.full_kv_pool, full),
                *self._windowed("swa", pool.swa_kv_pool, window),
            ]
        if kind == "HybridLinearKVPool":
            layers = sorted(pool.full_attention_layer_id_mapping, key=pool.full_attention_layer_id_mapping.get)
            return self._full(pool.full_kv_pool, layers)
        if kind == "MiniMaxSparseKVPool":
            return self._minimax_sparse()
        if kind == "DeepSeekV4TokenToKVPool":
            return self._deepseek_v4()
        return self._full(pool, None)

    def _states(self) -> list[PoolAdapter]:
        """Recurrent states, which hybrid models keep beside the KV."""
        requests = self._requests
        pool = getattr(requests, "mamba_pool", None)
        if requests is None or pool is None or states.is_guarded(pool):
            return []
        siblings = [
            item
            for name in ("short_conv_pool", "ngram_pool")
            for item in _left_out(f"{states.REGION}/{name}", getattr(requests, name, None), "not described yet")
        ]
        reason = "a draft model's states" if self._is_draft else states.refusal(requests)
        if reason is None:
            try:
                return [states.StatePool(pool, list(requests.mamba_map)), *siblings]
            except AttachError as error:
                reason = f"{type(pool).__name__} is not as expected: {error}"
        return [Unguarded(states.REGION, tensor_bytes(pool), reason), *siblings]

    def _full(self, pool: Any, layers: Sequence[int] | None) -> list[PoolAdapter]:
        return [] if not pool.layer_num else [_known("full", pool, layers)]

    def _windowed(self, name: str, pool: Any, layers: Sequence[int] | None) -> list[PoolAdapter]:
        if not pool.layer_num:
            return []
        slot_map = self._pool.full_to_swa_index_mapping
        if self._window_tokens is None or slot_map is None:
            lacks = "a window length" if self._window_tokens is None else "a map from full slots"
            return [Unguarded(name, tensor_bytes(pool), f"{type(pool).__name__} without {lacks}")]
        return [WindowPool(_known(name, pool, layers), self._window_tokens, slot_map, NULL_SLOT)]

    def _deepseek_v4(self) -> list[PoolAdapter]:
        pool = self._pool
        if getattr(pool, "swa_kv_pool", None) is None:
            return [Unguarded("pool", tensor_bytes(pool), "DeepSeek-V4's unified and request-window layouts")]
        state = "rings of the compressor, rewritten in place; not described yet"
        indexer = getattr(pool, "c4_indexer_kv_pool", None)
        return [
            *self._windowed("swa", pool.swa_kv_pool, None),
            *self._compressed("c4", 4, getattr(pool, "c4_kv_pool", None), indexer),
            *self._compressed("c128", 128, getattr(pool, "c128_kv_pool", None), None),
            *_left_out("compressor states", getattr(pool, "compress_state_pools", None), state),
            *_left_out("indexer states", getattr(pool, "indexer_compress_state_pools", None), state),
        ]

    def _minimax_sparse(self) -> list[PoolAdapter]:
        """K and V of all layers, and the indexer's K (of some layers V, too) with the same slots."""
        pool = self._pool
        if getattr(pool, "dense_pool", None) is not None:
            return [Unguarded("pool", tensor_bytes(pool), "MiniMax's sparse pool with HiSparse")]
        return [
            *self._full(pool.main_pool, None),
            *(
                _known(name, sub, list(mapping))
                for name, sub, mapping in (
                    ("index_kv", pool.index_kv_pool, pool.index_kv_layer_id_mapping),
                    ("index_k", pool.index_k_pool, pool.index_k_layer_id_mapping),
                )
                if sub is not None
            ),
        ]

    def _compressed(self, name: str, ratio: int, pool: Any, indexer: Any) -> list[PoolAdapter]:
        """A pool with one slot for ``ratio`` tokens; the indexer's keys have the same slots."""
        if pool is None or not pool.layer_num:
            return []
        layers = [i for i, r in enumerate(self._pool.compression_ratios) if r == ratio]
        try:
            return [CompressedPool(name, ratio, _compressed_sources(pool, indexer, layers))]
        except AttachError as error:
            size = tensor_bytes(pool) + tensor_bytes(indexer)
            return [Unguarded(name, size, f"{type(pool).__name__} is not as expected: {error}")]


@dataclass(frozen=True, slots=True)
class Unguarded(PoolAdapter):
    """Memory that we see and don't guard."""

    name: str
    size_bytes: int
    reason: str

    def regions(self) -> Sequence[Region]:
        """None."""
        return ()

    def uncovered(self) -> Sequence[Uncovered]:
        """All of it."""
        return (Uncovered(self.name, self.size_bytes, self.reason),)


class CompressedPool(PoolAdapter):
    """One region whose slots hold ``ratio`` tokens each; page 0 is padding, whose first slot no token gets."""

    def __init__(self, name: str, ratio: int, sources: Sequence[KVSource]) -> None:
        slots = min(source.tensor.shape[0] * source.page_size for source in sources)
        self._region = Region(
            name, slots, tuple(sources), RegionKind.COMPRESSED, null_slot=NULL_SLOT, tokens_per_slot=ratio
        )
        require_disjoint([self._region])

    def regions(self) -> Sequence[Region]:
        """The one."""
        return (self._region,)


class WholePool(PoolAdapter):
    """Another adapter, held against the size that the engine itself gives for its pool."""

    def __init__(self, name: str, pool: Any, adapter: PoolAdapter) -> None:
        self._name = name
        self._adapter = adapter
        sizes = pool.get_kv_size_bytes()
        self._all_bytes = int(sum(sizes) if isinstance(sizes, tuple) else sizes)

    def regions(self) -> Sequence[Region]:
        """The adapter's."""
        return self._adapter.regions()

    def uncovered(self) -> Sequence[Uncovered]:
        """The adapter's, and bytes that are in none of its sources."""
        known = tuple(self._adapter.uncovered())
        guarded = sum(region.pool_bytes for region in self._adapter.regions())
        rest = self._all_bytes - guarded - sum(item.size_bytes for item in known)
        if rest <= 0:
            return known
        return (*known, Uncovered(f"{self._name}/rest", rest, "tensors of the pool that are not known to us"))


class SourcePool(PoolAdapter):
    """One region from ready sources of one index space, and what was left out."""

    def __init__(self, name: str, slots: int, sources: Iterable[KVSource], left_out: Sequence[Uncovered] = ()) -> None:
        self._region = Region(name, slots, tuple(sources), null_slot=NULL_SLOT)
        self._left_out = tuple(left_out)
        require_disjoint([self._region])

    def regions(self) -> Sequence[Region]:
        """The one."""
        return (self._region,)

    def uncovered(self) -> Sequence[Uncovered]:
        """What was left out."""
        return self._left_out


def tensor_bytes(thing: Any) -> int:
    """Bytes of all tensors of a pool, however they are kept; each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(thing, 0)}.values())


def _known(name: str, pool: Any, layers: Sequence[int] | None) -> PoolAdapter:
    """The pool by its class; `Unguarded` for one that is not known or not as expected."""
    kind = type(pool).__name__
    describe = _POOLS.get(kind)
    if describe is None:
        return Unguarded(name, tensor_bytes(pool), f"{kind} is not a pool that this canary-sglang knows")
    first = int(pool.start_layer)
    try:
        return describe(name, pool, layers or range(first, first + pool.layer_num))
    except AttachError as error:
        return Unguarded(name, tensor_bytes(pool), f"{kind} is not as expected: {error}")


def _mha(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    arrangement = getattr(pool, "kv_cache_layout", "nhd")
    if arrangement not in ("nhd", "hnd"):
        raise AttachError(f"kv_cache_layout is {arrangement!r}, known are 'nhd' and 'hnd'")
    k_scales, v_scales = (getattr(pool, f"{half}_scale_buffer", None) for half in "kv")
    tensors = [
        LayerTensors(
            layer,
            {"k": pool.k_buffer[i], "v": pool.v_buffer[i]},
            {} if k_scales is None or v_scales is None else {"k_scale": k_scales[i], "v_scale": v_scales[i]},
            dtype=None if k_scales is not None else _element_type(pool, pool.k_buffer[i]),
        )
        for i, layer in enumerate(layers)
    ]
    if arrangement == "hnd":
        return WholePool(name, pool, PagedPool(name, tensors, page_dim=0, slot_dim=2, null_slot=NULL_SLOT))
    return WholePool(name, pool, RowPool(name, tensors, slots=_slots(pool), null_slot=NULL_SLOT))


def _mxfp8(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    """Rows of fp8; scales beside them only where they are rows, too."""
    flat = not pool.mxfp8_sf_interleaved
    tensors = [
        LayerTensors(
            layer,
            {"k": pool.k_buffer[i], "v": pool.v_buffer[i]},
            {"k_scale": pool.k_scale_buffer[i], "v_scale": pool.v_scale_buffer[i]} if flat else {},
        )
        for i, layer in enumerate(layers)
    ]
    rows = RowPool(name, tensors, slots=_slots(pool), null_slot=NULL_SLOT)
    if flat:
        return rows
    size = sum(scale.nbytes for scale in (*pool.k_scale_buffer, *pool.v_scale_buffer))
    reason = "a page's scales are interleaved in the order of a matrix instruction; not described"
    return JoinedPools([rows, Unguarded(f"{name}/scales", size, reason)])


def _k_only(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    tensors = [LayerTensors(layer, {}, index={"index": pool.k_buffer[i]}) for i, layer in enumerate(layers)]
    return WholePool(name, pool, RowPool(name, tensors, slots=_slots(pool), null_slot=NULL_SLOT))


def _page_major(name: str, pool: Any, layers: Sequence[int]) -> PoolAdapter:
    tensors = [
        LayerTensors(
            layer,
            {"k": pool.k_buffer[i], "v": pool.v_buffer[i]},
            dtype=_element_type(pool, pool.k_buffer[i]),
        )
        for i, layer in enumerate(layers)
    ]
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
    """MLA rows and, in pages of their own with the same slot numbers, the indexer's keys and scales."""
    packed = bool(getattr(pool, "dsa_kv_cache_store_fp8", False) or getattr(pool, "nsa_kv_cache_store_fp8", False))
    # A packed row holds fp8, scales and bf16 side by side, so its bytes have no one type.
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
    return SourcePool(name, slots, sources, left_out)


def _compressed_sources(pool: Any, indexer: Any, layers: Sequence[int]) -> list[KVSource]:
    """Packed pages of a compressed pool, and of the indexer that goes with it."""
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


def _slots(pool: Any) -> int:
    """The engine keeps one page more than it hands out: the first one, for padding."""
    return int(pool.size + pool.page_size)


def _element_type(pool: Any, tensor: Tensor) -> torch.dtype | None:
    """fp8 is kept as uint8, the pool knows what it is."""
    if tensor.dtype.is_floating_point or pool.dtype not in CHECKED_DTYPES or pool.dtype.itemsize != tensor.itemsize:
        return None
    known: torch.dtype = pool.dtype
    return known


def _layers_of(mapping: Mapping[int, tuple[int, bool]]) -> tuple[list[int], list[int]]:
    """Model layers of the full and of the window pool, each in the order of the pool's tensors."""
    by_pool = [sorted((i, layer) for layer, (i, window) in mapping.items() if window is w) for w in (False, True)]
    full, window = ([layer for _, layer in pairs] for pairs in by_pool)
    return full, window


def _left_out(name: str, pool: Any, reason: str) -> list[PoolAdapter]:
    size = tensor_bytes(pool)
    return [Unguarded(name, size, reason)] if size else []


def _tensors(thing: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            yield from _tensors(item, depth + 1)
    elif isinstance(thing, dict):
        yield from _tensors(list(thing.values()), depth)
    elif depth < 4 and (depth == 0 or _is_sglangs(thing)) and hasattr(thing, "__dict__"):
        yield from _tensors(list(vars(thing).values()), depth + 1)


def _is_sglangs(thing: Any) -> bool:
    """Also of a class derived from one of SGLang's: what lies elsewhere may hold half the process."""
    return any(base.__module__.startswith("sglang.") for base in type(thing).__mro__)
