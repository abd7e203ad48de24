"""Ready `PoolAdapter`s: layers' tensors in, `Region`s out, with every address checked at attach."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from canary_adapters.addresses import require_disjoint
from canary_adapters.sources import (
    PackedPage,
    Part,
    growing_source,
    packed_page_padding,
    packed_page_source,
    paged_source,
    require_pool_page,
    row_slots,
    row_source,
)
from canary_core.adapters import PoolAdapter
from canary_core.errors import AttachError
from canary_core.region import KVSource, Region, RegionKind, Role, Uncovered


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """One layer's tensors, by half: ``data={"k": K, "v": V}``, or ``{"kv": latent}`` for MLA.

    ``scales`` and ``index``: tensors beside the data in a quantized or a sparse layer, also one entry a slot.
    ``dtype``: element type of the data where the tensors' own doesn't tell (fp8 kept as uint8).
    """

    layer: int
    data: Mapping[str, Tensor]
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    index: Mapping[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype | None = None

    def parts(self) -> Iterator[tuple[Part, Tensor]]:
        """Every tensor with its description."""
        for half, tensor in self.data.items():
            yield Part(half, self.layer, self.dtype), tensor
        for half, tensor in self.scales.items():
            yield Part(half, self.layer, role=Role.SCALE), tensor
        for half, tensor in self.index.items():
            yield Part(half, self.layer, role=Role.INDEX), tensor


def kv_layers(keys: Sequence[Tensor], values: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[LayerTensors]:
    """Layers 0, 1, ... of a pool with one K and one V tensor each. Raises `AttachError` if their numbers differ."""
    if len(keys) != len(values):
        raise AttachError(f"a pool needs as many V tensors as K tensors, got {len(values)} and {len(keys)}")
    return [
        LayerTensors(layer, {"k": k, "v": v}, dtype=dtype)
        for layer, (k, v) in enumerate(zip(keys, values, strict=True))
    ]


def stacked_layers(pools: Sequence[Tensor], half_dim: int = 0, dtype: torch.dtype | None = None) -> list[LayerTensors]:
    """Layers 0, 1, ... of a pool that stacks K and V along ``half_dim``: 0 for ``[2, pages, ...]``, 1 for ``[pages, 2,
    ...]``. The other dimensions keep their order. Raises `AttachError` if there aren't two halves."""
    for layer, pool in enumerate(pools):
        if not -pool.dim() <= half_dim < pool.dim() or pool.shape[half_dim] != 2:
            raise AttachError(
                f"layer {layer}: dimension {half_dim} must stack K and V, got shape {tuple(pool.shape)}; check half_dim"
            )
    return kv_layers([p.select(half_dim, 0) for p in pools], [p.select(half_dim, 1) for p in pools], dtype)


NullSlots = int | range | None
"""The padding slots of a pool: one slot, a range of them where an engine pads with a block, or None."""


def _with_null_slots(region: Region, null: NullSlots) -> Region:
    """``region`` with the given padding slots; unchanged for None."""
    if null is None:
        return region
    if isinstance(null, int):
        return replace(region, null_slot=null, null_slots=1)
    if null.step != 1:
        raise AttachError(f"region {region.name!r}: the null slots must be one after another, got {null}")
    return replace(region, null_slot=null.start, null_slots=len(null))


class _LayerPool(PoolAdapter):
    """One region from layers' tensors; a subclass turns a tensor into sources and counts its slots."""

    def __init__(self, name: str, layers: Sequence[LayerTensors], slots: int | None, null_slot: NullSlots) -> None:
        self._name = name
        self._layers = tuple(layers)
        self._slots = slots
        self._null_slot = null_slot

    @abstractmethod
    def _sources(self, tensor: Tensor, part: Part) -> Iterable[KVSource]: ...

    @abstractmethod
    def _slots_of(self, tensor: Tensor) -> int: ...

    def regions(self) -> Sequence[Region]:
        """One region of all layers. Raises `AttachError` where a tensor doesn't fit, slot counts differ, or two
        sources overlap."""
        parts = [(part, tensor) for layer in self._layers for part, tensor in layer.parts()]
        sources = tuple(source for part, tensor in parts for source in self._sources(tensor, part))
        slots = self._slot_count({part.name: self._slots_of(tensor) for part, tensor in parts})
        region = _with_null_slots(Region(self._name, slots, sources), self._null_slot)
        require_disjoint([region])
        return (region,)

    def _slot_count(self, counts: Mapping[str, int]) -> int:
        fewest = min(counts, key=lambda name: counts[name], default=None)
        if fewest is None:
            raise AttachError(f"region {self._name!r} has no tensors; give at least one layer with data")
        most = max(counts, key=lambda name: counts[name])
        if self._slots is None and counts[fewest] != counts[most]:
            raise AttachError(
                f"region {self._name!r}: all tensors must have the same number of slots, got {counts[fewest]} in "
                f"{fewest} and {counts[most]} in {most}; give the pool's own count if the rest is spare"
            )
        slots = counts[fewest] if self._slots is None else self._slots
        if slots > counts[fewest]:
            raise AttachError(
                f"region {self._name!r}: slots is {slots}, but {fewest} has {counts[fewest]}; check the slot count"
            )
        return slots


class RowPool(_LayerPool):
    """Tensors ``[rows, ...]``, one row a slot. ``slots``: how many rows are slots, all by default. ``pool_page``:
    ``(rows, slots)`` where layers' pages interleave in one tensor (`row_source`)."""

    def __init__(
        self,
        name: str,
        layers: Sequence[LayerTensors],
        slots: int | None = None,
        null_slot: NullSlots = None,
        pool_page: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(name, layers, slots, null_slot)
        self._pool_page = pool_page if pool_page is None else require_pool_page(pool_page, f"region {name!r}")

    def _sources(self, tensor: Tensor, part: Part) -> Iterable[KVSource]:
        return (row_source(tensor, part, self._pool_page),)

    def _slots_of(self, tensor: Tensor) -> int:
        return row_slots(tensor, self._pool_page)

    def uncovered(self) -> Sequence[Uncovered]:
        """Rows beyond ``slots``. None for an interleaved tensor, whose other rows are other layers'."""
        if self._slots is None or self._pool_page is not None:
            return ()
        return tuple(
            Uncovered(
                f"{self._name}/{part.name}",
                spare * tensor[0].nbytes,
                f"{spare} rows beyond the pool's slots",
                tensor[self._slots :],
            )
            for layer in self._layers
            for part, tensor in layer.parts()
            if (spare := tensor.shape[0] - self._slots) > 0
        )


class PagedPool(_LayerPool):
    """Block pools: ``page_dim`` numbers the pages and ``slot_dim`` the slots of a page in every tensor
    (`paged_source`); `stacked_layers` takes apart pools that stack K and V."""

    def __init__(
        self,
        name: str,
        layers: Sequence[LayerTensors],
        page_dim: int = 0,
        slot_dim: int = 1,
        null_slot: NullSlots = None,
    ) -> None:
        super().__init__(name, layers, None, null_slot)
        self._dims = (page_dim, slot_dim)

    def regions(self) -> Sequence[Region]:
        """As for every pool; also raises `AttachError` if tensors differ in page size."""
        regions = super().regions()
        sources = regions[0].sources
        for source in sources:
            if source.page_size != sources[0].page_size:
                raise AttachError(
                    f"region {self._name!r}: all tensors must have the same page size, got {sources[0].page_size} in "
                    f"{sources[0].name} and {source.page_size} in {source.name}; check page_dim and slot_dim"
                )
        return regions

    def _sources(self, tensor: Tensor, part: Part) -> Iterable[KVSource]:
        return (paged_source(tensor, part, *self._dims),)

    def _slots_of(self, tensor: Tensor) -> int:
        page_dim, slot_dim = self._dims
        return tensor.shape[page_dim] * tensor.shape[slot_dim]


class PackedPool(_LayerPool):
    """Byte pages of a data and a scale strip (`packed_page_source`): DeepSeek-V4's pools, DSA's indexer."""

    def __init__(
        self, name: str, layers: Sequence[LayerTensors], layout: PackedPage, null_slot: NullSlots = None
    ) -> None:
        super().__init__(name, layers, None, null_slot)
        self._layout = layout

    def _sources(self, tensor: Tensor, part: Part) -> Iterable[KVSource]:
        return packed_page_source(tensor, part, self._layout)

    def _slots_of(self, tensor: Tensor) -> int:
        return tensor.shape[0] * self._layout.page_size

    def uncovered(self) -> Sequence[Uncovered]:
        """The padding at the end of every page."""
        return tuple(
            Uncovered(
                f"{self._name}/{part.name}",
                tensor.shape[0] * spare,
                "page padding, holds no KV",
                packed_page_padding(tensor, self._layout),
            )
            for layer in self._layers
            for part, tensor in layer.parts()
            if (spare := tensor[0].nbytes - self._layout.used_bytes) > 0
        )


class GrowingPool(_LayerPool):
    """Caches ``[batch, heads, tokens so far, dim]``, reallocated for growth (`growing_source`). The region has ``batch
    * max_tokens`` slots from the start; after a reallocation `SlotEvents.rebind` takes the new sources."""

    def __init__(
        self, name: str, layers: Sequence[LayerTensors], max_tokens: int, batch_dim: int = 0, token_dim: int = 2
    ) -> None:
        super().__init__(name, layers, None, None)
        self._max_tokens = max_tokens
        self._dims = (batch_dim, token_dim)

    def _sources(self, tensor: Tensor, part: Part) -> Iterable[KVSource]:
        return (growing_source(tensor, part, self._max_tokens, *self._dims),)

    def _slots_of(self, tensor: Tensor) -> int:
        return tensor.shape[self._dims[0]] * self._max_tokens


class RegionPool(PoolAdapter):
    """A region already described, and memory left out beside it. Raises `AttachError` where two of its sources
    overlap."""

    def __init__(self, region: Region, left_out: Iterable[Uncovered] = ()) -> None:
        require_disjoint([region])
        self._region = region
        self._left_out = tuple(left_out)

    def regions(self) -> Sequence[Region]:
        """The one."""
        return (self._region,)

    def uncovered(self) -> Sequence[Uncovered]:
        """Memory left out."""
        return self._left_out


class WindowPool(PoolAdapter):
    """Any pool, of which a token reads only the last ``window_tokens`` positions (itself included).

    Slots come through a ring (`ring_table`) or through ``slot_map``, int32 or int64 ``[full slots + 1]``, from the
    slots of a full pool; entries that are evicted hold ``null_slot``.
    """

    def __init__(
        self,
        pool: PoolAdapter,
        window_tokens: int,
        slot_map: Tensor | None = None,
        null_slot: NullSlots = None,
    ) -> None:
        self._pool = pool
        self._window_tokens = window_tokens
        self._slot_map = slot_map
        self._null_slot = null_slot

    def regions(self) -> Sequence[Region]:
        """The pool's regions as windows. Raises `AttachError` if one already is a window."""
        regions = self._pool.regions()
        for region in regions:
            if region.kind is not RegionKind.FULL:
                raise AttachError(f"region {region.name!r} is {region.kind.value} already; wrap a full pool")
        windows = (
            replace(region, kind=RegionKind.WINDOW, window_tokens=self._window_tokens, slot_map=self._slot_map)
            for region in regions
        )
        return tuple(_with_null_slots(region, self._null_slot) for region in windows)

    def uncovered(self) -> Sequence[Uncovered]:
        """Memory left out by the pool."""
        return self._pool.uncovered()

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """The pool's tensors."""
        return self._pool.pool_tensors()


class JoinedPools(PoolAdapter):
    """Several pools of one engine. ``sharing``: sets of region names whose regions take turns on the same memory
    (hybrid groups); any other two regions must not overlap."""

    def __init__(self, pools: Sequence[PoolAdapter], sharing: Iterable[frozenset[str]] = ()) -> None:
        self._pools = tuple(pools)
        self._sharing = tuple(sharing)
        self._undecided: tuple[str, ...] = ()

    def regions(self) -> Sequence[Region]:
        """All pools' regions. Raises `AttachError` on a name given twice and on overlapping addresses."""
        regions = tuple(region for pool in self._pools for region in pool.regions())
        names = [region.name for region in regions]
        if len(set(names)) != len(names):
            raise AttachError(f"regions must have different names, got {names}; name each pool after what it holds")
        self._undecided = require_disjoint(regions, self._sharing)
        return regions

    def uncovered(self) -> Sequence[Uncovered]:
        """Memory left out by all pools; after `regions` also pairs of sources, without bytes, whose overlap is
        undecided."""
        doubts = (Uncovered(pair, 0, "may share bytes, which took too long to decide") for pair in self._undecided)
        return (*(item for pool in self._pools for item in pool.uncovered()), *doubts)

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """Tensors of all pools."""
        return {name: tensor for pool in self._pools for name, tensor in pool.pool_tensors().items()}
