"""Where a layer's own store operation puts the bytes of a token, found by writing probes.

A cache's shape may lie: CPU attention transposes K inside a block, others pack K and V of a head together, and two
backends with the same shape differ in their strides. So the operation is run on a small tensor with the cache's order
of dimensions, one slot at a time, and what changed is where the bytes are. vLLM's own cache is not touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core import AttachError, KVSource
from canary_vllm.compat.layers import Store, element_type

PROBE_BLOCKS = 3
ROUNDS = 2
"""Times each probe is written, with other numbers: a packed format may store one of them as zero bytes."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Piece:
    """Affine bytes of one half: see `KVSource`. ``part``: which of several, None for the only one."""

    half: str
    part: int | None
    offset_bytes: int
    chunk_bytes: int
    chunks: int
    chunk_stride_bytes: int
    slot_stride_bytes: int
    page_stride_bytes: int

    def source(self, cache: Tensor, page: int, layer: int, dtype: torch.dtype | None) -> KVSource:
        """The source of ``layer``, whose ``cache`` is laid out like this."""
        return KVSource(
            cache,
            self.half,
            layer,
            chunk_bytes=self.chunk_bytes,
            slot_stride_bytes=self.slot_stride_bytes,
            page_size=page,
            page_stride_bytes=self.page_stride_bytes,
            offset_bytes=self.offset_bytes,
            chunks=self.chunks,
            chunk_stride_bytes=self.chunk_stride_bytes,
            dtype=dtype,
            part=self.part,
        )


class Layouts:
    """The layouts of one runner's layers, each sort probed once. ``dtype``: that of the model's activations."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known: dict[tuple[object, ...], tuple[Piece, ...]] = {}

    def sources(self, layer: object, cache: Tensor, pages: int, page: int, number: int) -> list[KVSource]:
        """Sources of ``layer`` number ``number``, whose ``cache`` has ``pages`` pages of ``page`` slots. Raises
        `AttachError` where its bytes can't be described."""
        store = Store.of(layer)
        key = (*store.sort, tuple(cache.shape), cache.stride(), cache.dtype, page)
        if key not in self._known:
            self._known[key] = _Probe(store, cache, pages, page).pieces(self._dtype)
        return [piece.source(cache, page, number, element_type(layer, cache)) for piece in self._known[key]]


class _Probe:
    def __init__(self, store: Store, cache: Tensor, pages: int, page: int) -> None:
        self._store, self._page = store, page
        dims = [d for d in range(cache.dim()) if cache.shape[d] == pages]
        if not dims:
            raise AttachError(f"no dimension of the cache counts its {pages} blocks, got shape {tuple(cache.shape)}")
        strides = list(cache.stride())
        block = max(dims, key=strides.__getitem__)
        order = sorted(range(cache.dim()), key=lambda d: (-strides[d], d))
        sizes = [PROBE_BLOCKS if d == block else cache.shape[d] for d in order]
        self._scratch = torch.zeros(sizes, dtype=cache.dtype, device=cache.device).permute(
            *(order.index(d) for d in range(cache.dim()))
        )
        self._bytes = cache.element_size()
        self._strides = torch.tensor(strides) * self._bytes

    def pieces(self, dtype: torch.dtype) -> tuple[Piece, ...]:
        """All halves. Raises `AttachError` where one is not affine, or two share bytes."""
        found: list[Piece] = []
        taken: set[int] = set()
        for half in self._store.halves:
            offsets = [self._touched(half, slot, dtype) for slot in range(2 * self._page)]
            if taken & {n for some in offsets for n in some}:
                raise AttachError(f"{half} is stored over another half of the same token")
            taken.update(n for some in offsets for n in some)
            found += self._fit(half, offsets)
        return tuple(found)

    def _touched(self, half: str, slot: int, dtype: torch.dtype) -> list[int]:
        """Byte offsets, from the start of the cache, of the elements that change when ``slot`` is stored."""
        scratch, every = self._scratch, set()
        for _ in range(ROUNDS):
            scratch.zero_()
            self._store(scratch, half, torch.tensor([slot], device=scratch.device), dtype)
            places = scratch.view(INTEGERS[self._bytes]).nonzero().cpu()
            every.update(((places * self._strides).sum(1)).tolist())
        if not every:
            raise AttachError(f"storing {half} of slot {slot} changed nothing")
        return sorted(every)

    def _fit(self, half: str, offsets: Sequence[Sequence[int]]) -> list[Piece]:
        """``offsets``: of each slot of the first two pages."""
        page, first = self._page, offsets[0]
        page_stride = offsets[page][0] - first[0]
        slot_stride = offsets[1][0] - first[0] if page > 1 else page_stride
        for slot, some in enumerate(offsets):
            shift = slot // page * page_stride + slot % page * slot_stride
            if list(some) != [n + shift for n in first]:
                raise AttachError(f"{half} of slot {slot} does not lie where those of slots 0, 1 and {page} say")
        starts = [n for i, n in enumerate(first) if i == 0 or n != first[i - 1] + self._bytes]
        size = len(first) * self._bytes // len(starts)
        ends = [n + self._bytes for i, n in enumerate(first) if i + 1 == len(first) or first[i + 1] != n + self._bytes]
        if [end - start for start, end in zip(starts, ends, strict=True)] != [size] * len(starts):
            raise AttachError(f"{half} of one token lies in pieces of different lengths")
        stride = starts[1] - starts[0] if len(starts) > 1 else 0
        chunks = next((i for i in range(1, len(starts)) if starts[i] != starts[0] + i * stride), len(starts))
        parts = [starts[i : i + chunks] for i in range(0, len(starts), chunks)]
        for part in parts:
            if part != [part[0] + i * stride for i in range(chunks)]:
                raise AttachError(f"{half} of one token lies at {len(starts)} places without a common distance")
        return [
            Piece(half, i if len(parts) > 1 else None, part[0], size, chunks, stride, slot_stride, page_stride)
            for i, part in enumerate(parts)
        ]
