"""`probe_layout`: where an engine's own store operation puts the bytes of a token, found by writing probes.

A cache's shape may lie: CPU attention transposes K inside a block, others pack K and V of a head together, and two
backends with the same shape differ in their strides. So the operation is run on a small tensor with the cache's order
of dimensions, one slot at a time, and what changed is where the bytes are. The engine's own cache is not touched.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.errors import AttachError
from canary_core.region import KVSource

PROBE_BLOCKS = 3
ROUNDS = 3
"""Writes of each probe, with other numbers each time: a packed format may store one of them as zero bytes, or a scale
with a byte equal to one of the scale of zeros."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Store = Callable[[Tensor, str, Tensor], None]
"""``store(cache, half, slots)`` stores made-up nonzero numbers as ``half`` of tokens at ``slots`` (int64 ``[n]``) of
``cache``, by the engine's own operation, and zeros as the rest. With an empty ``half`` everything is 0."""


@dataclass(frozen=True, slots=True)
class ProbedPiece:
    """Affine bytes of one half: see `KVSource`. ``part``: number among several, None for the only one."""

    half: str
    part: int | None
    offset_bytes: int
    chunk_bytes: int
    chunks: int
    chunk_stride_bytes: int
    slot_stride_bytes: int
    page_stride_bytes: int

    def source(self, cache: Tensor, page: int, layer: int, dtype: torch.dtype | None) -> KVSource:
        """The source of ``layer`` in ``cache``, with the same layout."""
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


def probe_layout(store: Store, halves: Iterable[str], cache: Tensor, pages: int, page: int) -> tuple[ProbedPiece, ...]:
    """Where ``store`` puts ``halves`` in a cache like ``cache``, which has ``pages`` pages of ``page`` slots. To be
    asked before the first forward, once for each sort of layer: it reads from the device. Raises `AttachError` where a
    half is not affine (see `KVSource`), or two share bytes."""
    return _Probe(store, cache, pages, page).pieces(halves)


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
        self._strides = torch.tensor(strides, device="cpu") * self._bytes

    def pieces(self, halves: Iterable[str]) -> tuple[ProbedPiece, ...]:
        found: list[ProbedPiece] = []
        taken: set[int] = set()
        for half in halves:
            offsets = [self._touched(half, slot) for slot in range(2 * self._page)]
            if taken & {n for some in offsets for n in some}:
                raise AttachError(f"{half} is stored over another half of the same token")
            taken.update(n for some in offsets for n in some)
            found += self._fit(half, offsets)
        return tuple(found)

    def _touched(self, half: str, slot: int) -> list[int]:
        """Byte offsets, from the start of the cache, of the elements that are others than where zeros are stored in
        ``slot``: the scale of zeros need not be 0."""
        scratch, every = self._scratch, set()
        slots, bits = torch.tensor([slot], device=scratch.device), scratch.view(INTEGERS[self._bytes])
        scratch.zero_()
        self._store(scratch, "", slots)
        zeros = bits.clone()
        for _ in range(ROUNDS):
            scratch.zero_()
            self._store(scratch, half, slots)
            places = (bits != zeros).nonzero().cpu()
            every.update(((places * self._strides).sum(1)).tolist())
        if not every:
            raise AttachError(f"storing {half} of slot {slot} changed nothing")
        return sorted(every)

    def _fit(self, half: str, offsets: Sequence[Sequence[int]]) -> list[ProbedPiece]:
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
            ProbedPiece(half, i if len(parts) > 1 else None, part[0], size, chunks, stride, slot_stride, page_stride)
            for i, part in enumerate(parts)
        ]


class ProbedLayouts:
    """The layouts of an engine's layers, each sort probed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[ProbedPiece, ...]] = {}

    def of(
        self, sort: tuple[object, ...], cache: Tensor, probe: Callable[[], tuple[ProbedPiece, ...]]
    ) -> tuple[ProbedPiece, ...]:
        """That by ``probe``, a `probe_layout`; layers of one ``sort`` store alike in caches of the same shape."""
        key = (*sort, tuple(cache.shape), cache.stride(), cache.dtype)
        if key not in self._known:
            self._known[key] = probe()
        return self._known[key]
