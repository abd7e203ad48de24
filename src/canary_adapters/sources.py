"""Sources: a tensor and the meaning of its dimensions → `KVSource`. Addresses come from strides, never from shapes.

Every factory raises `AttachError` where the tensor isn't affine in KVSource's sense (one stride for pages, one for
slots, one for chunks), where two slots share bytes, and where sizes don't fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_adapters.addresses import require_distinct_slots
from canary_core.errors import AttachError
from canary_core.region import KVSource, Role

CHECKED_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Element types checked by the core for NaN and infinity; others are bytes to it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Meaning of a source's bytes: ``half`` ("k", "v", "kv", "k_scale", ...) of ``layer``, and their role.

    ``dtype``: element type where the tensor's own doesn't tell (fp8 kept as uint8). None takes the tensor's own type if
    among `CHECKED_DTYPES`, else the bytes have no type and no non-finite check.
    """

    half: str
    layer: int
    dtype: torch.dtype | None = None
    role: Role = Role.DATA

    @property
    def name(self) -> str:
        """``half.layer``, as in findings."""
        return f"{self.half}.{self.layer}"


@dataclass(frozen=True, slots=True)
class PackedPage:
    """A page of bytes in two strips, then padding: slot ``i`` has ``data_bytes`` at ``i * data_bytes`` and
    ``scale_bytes`` at ``page_size * data_bytes + i * scale_bytes``.

    DeepSeek-V4: 64 slots (or 256, 2), 576 data and 8 scale bytes; DSA's indexer: 64 slots, 128 and 4.
    """

    page_size: int
    data_bytes: int
    scale_bytes: int

    def __post_init__(self) -> None:
        if min(self.page_size, self.data_bytes, self.scale_bytes) < 1:
            raise AttachError(f"packed page: sizes must be at least 1, got {self}; for one strip use paged_source")

    @property
    def used_bytes(self) -> int:
        """Bytes of a page before its padding."""
        return self.page_size * (self.data_bytes + self.scale_bytes)


def row_source(rows: Tensor, part: Part, pool_page: tuple[int, int] | None = None) -> KVSource:
    """One row a slot: ``rows`` is ``[rows, ...]`` with any trailing shape and strides that need one chunk stride.

    ``pool_page``: ``(rows, slots)`` where pages of several layers interleave in one tensor: of each ``rows`` rows the
    first ``slots`` are this source's; row ``n`` is slot ``n // rows * slots + n % rows`` (as `SlotTable.pool_page`).
    """
    _require_dims(rows, part, least=1)
    chunks = _chunks(rows, part, range(1, rows.dim()))
    stride = rows.stride(0) * rows.element_size()
    page_rows, page_slots = require_pool_page(pool_page, part.name) if pool_page else (1, 1)
    source = KVSource(
        rows,
        part.half,
        part.layer,
        chunk_bytes=chunks.size_bytes,
        slot_stride_bytes=stride,
        page_size=page_slots,
        page_stride_bytes=page_rows * stride,
        chunks=chunks.count,
        chunk_stride_bytes=chunks.stride_bytes,
        dtype=_element_type(rows, part, chunks),
        role=part.role,
    )
    return _with_slots(source, row_slots(rows, pool_page))


def paged_source(pool: Tensor, part: Part, page_dim: int = 0, slot_dim: int = 1) -> KVSource:
    """A block pool: ``page_dim`` numbers the pages, ``slot_dim`` the slots of a page, the others are contents.

    ``[pages, page_size, heads, dim]`` is the default; heads-first ``[pages, heads, page_size, dim]`` has slot_dim 2.
    Of a pool that stacks K and V pass one half: ``pool[0]`` of ``[2, pages, ...]``, ``pool[:, 0]`` of
    ``[pages, 2, ...]``; views keep their strides. A static cache ``[batch, heads, tokens, dim]`` is a pool with one
    page a row.
    """
    _require_dims(pool, part, least=2)
    page_dim, slot_dim = _two_dims(pool, part, {"page_dim": page_dim, "slot_dim": slot_dim})
    chunks = _chunks(pool, part, [d for d in range(pool.dim()) if d not in (page_dim, slot_dim)])
    source = KVSource(
        pool,
        part.half,
        part.layer,
        chunk_bytes=chunks.size_bytes,
        slot_stride_bytes=pool.stride(slot_dim) * pool.element_size(),
        page_size=pool.shape[slot_dim],
        page_stride_bytes=pool.stride(page_dim) * pool.element_size(),
        chunks=chunks.count,
        chunk_stride_bytes=chunks.stride_bytes,
        dtype=_element_type(pool, part, chunks),
        role=part.role,
    )
    return _with_slots(source, pool.shape[page_dim] * pool.shape[slot_dim])


def packed_page_source(pages: Tensor, part: Part, layout: PackedPage) -> tuple[KVSource, KVSource]:
    """The data and the scale source of byte pages; ``pages`` is ``[pages, ...]``, each page contiguous, of any dtype.

    The scale source is named ``<half>_scale``. Neither has an element type unless ``part.dtype`` gives the data's.
    """
    _require_dims(pages, part, least=2)
    page = _chunks(pages, part, range(1, pages.dim()))
    if page.count != 1:
        raise AttachError(
            f"{part.name}: a packed page must be contiguous, got shape {tuple(pages.shape)} with strides "
            f"{pages.stride()}; pass the pool as the engine allocated it"
        )
    if layout.used_bytes > page.size_bytes:
        raise AttachError(
            f"{part.name}: {layout} needs {layout.used_bytes} bytes a page, the tensor has {page.size_bytes}; check "
            f"page_size and the bytes per slot"
        )
    sources = []
    for half, role, slot_bytes, offset in (
        (part.half, part.role, layout.data_bytes, 0),
        (f"{part.half}_scale", Role.SCALE, layout.scale_bytes, layout.page_size * layout.data_bytes),
    ):
        dtype = part.dtype if offset == 0 else None
        if dtype is not None:
            _require_element_type(part, dtype, slot_bytes)
        source = KVSource(
            pages,
            half,
            part.layer,
            chunk_bytes=slot_bytes,
            slot_stride_bytes=slot_bytes,
            page_size=layout.page_size,
            page_stride_bytes=pages.stride(0) * pages.element_size(),
            offset_bytes=offset,
            dtype=dtype,
            role=role,
        )
        sources.append(_with_slots(source, pages.shape[0] * layout.page_size))
    return sources[0], sources[1]


def packed_page_padding(pages: Tensor, layout: PackedPage) -> Tensor:
    """The bytes at the end of each of ``pages`` left out by `packed_page_source`: uint8 ``[pages, bytes]``, in
    place."""
    size = pages.element_size()
    first, spare = pages.storage_offset() * size + layout.used_bytes, pages[0].nbytes - layout.used_bytes
    empty = torch.empty(0, dtype=torch.uint8, device=pages.device)
    return empty.set_(pages.untyped_storage(), first, (pages.shape[0], spare), (pages.stride(0) * size, 1))


def growing_source(cache: Tensor, part: Part, max_tokens: int, batch_dim: int = 0, token_dim: int = 2) -> KVSource:
    """A cache reallocated for growth, ``[batch, heads, tokens so far, dim]`` by default, also with no tokens yet. The
    slot of row ``b`` at position ``p`` is ``b * max_tokens + p`` whatever the tensor's length, and so are chunks, so
    that the source of the next, longer tensor has the same records and fingerprints (`SlotEvents.rebind`)."""
    _require_dims(cache, part, least=2, empty_dim=token_dim)
    batch_dim, token_dim = _two_dims(cache, part, {"batch_dim": batch_dim, "token_dim": token_dim})
    tokens = cache.shape[token_dim]
    if max_tokens < max(tokens, 1):
        raise AttachError(
            f"{part.name}: max_tokens {max_tokens} is less than the {tokens} tokens the cache holds; give the longest "
            f"sequence the cache can reach"
        )
    # Dimensions before and after the tokens never merge: at one token they would, and at two no more.
    outer = [d for d in range(token_dim) if d != batch_dim]
    inner = [d for d in range(token_dim + 1, cache.dim()) if d != batch_dim]
    chunks = _chunks(cache, part, inner, outer)
    source = KVSource(
        cache,
        part.half,
        part.layer,
        chunk_bytes=chunks.size_bytes,
        slot_stride_bytes=cache.stride(token_dim) * cache.element_size(),
        page_size=max_tokens,
        page_stride_bytes=cache.stride(batch_dim) * cache.element_size(),
        chunks=chunks.count,
        chunk_stride_bytes=chunks.stride_bytes,
        dtype=_element_type(cache, part, chunks),
        role=part.role,
        present=tokens,
    )
    return _with_slots(source, cache.shape[batch_dim] * max_tokens)


def row_slots(rows: Tensor, pool_page: tuple[int, int] | None = None) -> int:
    """Slots of a `row_source`: its rows, or those of all whole pages."""
    if pool_page is None:
        return rows.shape[0]
    page_rows, page_slots = pool_page
    return max(0, (rows.shape[0] - page_slots) // page_rows + 1) * page_slots


def require_pool_page(pool_page: tuple[int, int], name: str) -> tuple[int, int]:
    """``(rows, slots)`` of a page. Raises `AttachError` unless 1 <= slots <= rows."""
    page_rows, page_slots = pool_page
    if not 1 <= page_slots <= page_rows:
        raise AttachError(f"{name}: pool_page must be (rows, slots) with 1 <= slots <= rows, got {pool_page}")
    return page_rows, page_slots


@dataclass(frozen=True, slots=True)
class _Chunks:
    count: int
    stride_bytes: int
    size_bytes: int


def _chunks(tensor: Tensor, part: Part, inner: Sequence[int], outer: Sequence[int] = ()) -> _Chunks:
    """The contents of one slot as equal chunks at one stride: ``inner`` dimensions may form the chunk, ``outer`` ones
    only repeat it."""
    runs = _runs(tensor, part, inner)
    elements = runs.pop(0)[0] if runs and runs[0][1] == 1 else 1
    runs += _runs(tensor, part, outer)
    if len(runs) > 1:
        raise AttachError(
            f"{part.name}: the contents of a slot aren't equal chunks at one stride, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}; split the tensor into several sources"
        )
    count, stride = runs[0] if runs else (1, 0)
    size = tensor.element_size()
    return _Chunks(count, stride * size, elements * size)


def _runs(tensor: Tensor, part: Part, dims: Sequence[int]) -> list[tuple[int, int]]:
    """``(count, stride)`` in elements of ``dims``, smallest stride first, neighbours merged where one continues the
    other. By stride, not by dimension: a K stored transposed within its page is as contiguous as any."""
    runs: list[tuple[int, int]] = []
    for stride, count in sorted((tensor.stride(d), tensor.shape[d]) for d in dims if tensor.shape[d] > 1):
        if stride == 0:
            raise AttachError(
                f"{part.name}: a dimension is expanded (stride 0), got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}; give the tensor that was expanded"
            )
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * count, runs[-1][1])
        else:
            runs.append((count, stride))
    return runs


def _require_dims(tensor: Tensor, part: Part, least: int, empty_dim: int | None = None) -> None:
    """Raises `AttachError` unless ``tensor`` is memory with ``least`` dimensions, none but ``empty_dim`` empty."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise AttachError(
            f"{part.name}: needs a dense tensor with memory of its own, got layout {tensor.layout} on "
            f"{tensor.device}; attach after the pool is allocated"
        )
    if tensor.dim() < least:
        raise AttachError(
            f"{part.name}: needs at least {least} dimension(s), got shape {tuple(tensor.shape)}; check which tensor "
            f"of the pool this is"
        )
    may_be_empty = None if empty_dim is None else empty_dim % tensor.dim()
    if any(size == 0 for d, size in enumerate(tensor.shape) if d != may_be_empty):
        raise AttachError(
            f"{part.name}: the pool is empty, got shape {tuple(tensor.shape)}; attach after it is allocated"
        )


def _two_dims(tensor: Tensor, part: Part, dims: dict[str, int]) -> tuple[int, int]:
    """The two dimensions counted from 0. Raises `AttachError` if one does not exist or both are the same."""
    count = tensor.dim()
    places = [d % count for d in dims.values() if -count <= d < count]
    if len(set(places)) != 2:
        raise AttachError(
            f"{part.name}: {' and '.join(dims)} must be two dimensions of a {count}-dimensional tensor, got "
            f"{tuple(dims.values())} for shape {tuple(tensor.shape)}"
        )
    return places[0], places[1]


def _element_type(tensor: Tensor, part: Part, chunks: _Chunks) -> torch.dtype | None:
    own = tensor.dtype if tensor.dtype.is_floating_point else None
    if part.dtype is None:
        return own if own in CHECKED_DTYPES else None
    if own is not None and own != part.dtype:
        raise AttachError(
            f"{part.name}: the tensor is {own}, the description says {part.dtype}; leave dtype out for a float tensor"
        )
    _require_element_type(part, part.dtype, chunks.size_bytes)
    return part.dtype


def _require_element_type(part: Part, dtype: torch.dtype, chunk_bytes: int) -> None:
    if dtype not in CHECKED_DTYPES:
        raise AttachError(
            f"{part.name}: dtype {dtype} has no non-finite check; leave it None, or give one of "
            f"{', '.join(str(d) for d in CHECKED_DTYPES)}"
        )
    if chunk_bytes % dtype.itemsize:
        raise AttachError(
            f"{part.name}: {chunk_bytes} bytes aren't whole elements of {dtype} ({dtype.itemsize} bytes each); correct "
            f"dtype, or leave it None"
        )


def _with_slots(source: KVSource, slots: int) -> KVSource:
    """``source`` itself, after its ``slots`` slots were found to lie apart from each other."""
    if slots < 1:
        raise AttachError(
            f"{source.name}: no whole page fits, got shape {tuple(source.tensor.shape)} for pages of "
            f"{source.page_size} slots; check pool_page"
        )
    require_distinct_slots(source, slots)
    return source
