"""Guarded memory: `KVSource` locates a slot's bytes in one tensor, `Region` is a set of slots with sources."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from canary_core.errors import AttachError
from canary_core.records import Status

Count = TypeVar("Count", int, Tensor)

PARTIAL_BYTES = 16
"""How much of each source `CANARY_BYTES=partial` covers: the first bytes of a slot's first chunk."""


class RegionKind(str, Enum):
    """How a region's slots live."""

    FULL = "full"
    """Immutable after write, one slot per token."""
    WINDOW = "window"
    """As full, only the last ``window_tokens`` positions are readable, or, where the region is ``chunked``, those since
    the last position divisible by ``window_tokens``."""
    COMPRESSED = "compressed"
    """One slot for ``tokens_per_slot`` tokens, written with the last of them. Positions of such a region count slots:
    the group ``p`` ends with token ``(p + 1) * tokens_per_slot - 1``, and its slot is that token's slot number in the
    table divided by ``tokens_per_slot``."""
    STATE = "state"
    """One slot per request, rewritten by every forward (recurrent state, rolling rings): recorded after each forward as
    the state after the last token, compared before the next. The table is a ring of one slot a row."""
    RING = "ring"
    """A ring of slots for the latest tokens: the input of a compressor, with one output entry for each group of
    ``group_tokens`` tokens. Only a forward that completes a group reads slots: those of the group so far, and of the
    ``overlap_tokens`` tokens before. A later token of the same ring overwrites a slot; of several in one forward the
    last one stays."""


class Role(str, Enum):
    """Meaning of a source's bytes; only `DATA` is sure to change when another token is written."""

    DATA = "data"
    SCALE = "scale"
    INDEX = "index"
    STATE = "state"


@dataclass(frozen=True, slots=True, eq=False)
class KVSource:
    """Address of each slot's bytes in one tensor: one affine formula for every pool.

    For slot ``s``: ``page = s // page_size``, ``i = s % page_size``; chunk ``c`` starts at ``tensor.data_ptr() +
    offset_bytes + page * page_stride_bytes + i * slot_stride_bytes + c * chunk_stride_bytes`` and is ``chunk_bytes``
    long. The tensor is kept alive, and never written but for ``CANARY_REPAIR``.

    ``layer`` and ``half`` ("k", "v", "kv", "k_scale", "index", ...) name the source in findings. ``dtype`` is the
    element type for the non-finite check; None leaves the check out (packed or quantized bytes).
    ``present``: slots of each page held by the tensor, all by default; later slots of a page have no bytes (a growing
    cache: its index space is the full length, its tensor the length so far).
    ``part``: number among several sources of one half of a layer, where one formula is not enough; None: the only one.
    ``scaled``: type of the numbers of a chunk before its last four bytes, their float32 scale; ``dtype`` is None then.

    Raises `AttachError` for impossible sizes and for addresses outside of the tensor's storage.
    """

    tensor: Tensor = field(repr=False)
    half: str
    layer: int
    chunk_bytes: int
    slot_stride_bytes: int
    page_size: int = 1
    page_stride_bytes: int = 0
    offset_bytes: int = 0
    chunks: int = 1
    chunk_stride_bytes: int = 0
    dtype: torch.dtype | None = None
    role: Role = Role.DATA
    present: int | None = None
    part: int | None = None
    scaled: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "page_size", "chunks"):
            if getattr(self, name) < 1:
                raise AttachError(f"{self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if self.present is None:
            object.__setattr__(self, "present", self.page_size)
        elif not 0 <= self.present <= self.page_size:
            raise AttachError(f"{self.name}: present must be 0 to page_size {self.page_size}, got {self.present}")
        if self.page_size == 1 and self.page_stride_bytes == 0:
            object.__setattr__(self, "page_stride_bytes", self.slot_stride_bytes)
        if min(self.offset_bytes, self.page_stride_bytes, self.slot_stride_bytes, self.chunk_stride_bytes) < 0:
            raise AttachError(f"{self.name}: offsets and strides must not be negative, got {self}")

    @property
    def name(self) -> str:
        """``half.layer``, e.g. ``k.17``; with the ``part``, where there are several: ``k.17/2``."""
        return f"{self.half}.{self.layer}" if self.part is None else f"{self.half}.{self.layer}/{self.part}"

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in this source."""
        return self.chunks * self.chunk_bytes

    @property
    def words_per_chunk(self) -> int:
        """32-bit words of one chunk, the last one padded with zero bytes."""
        return -(-self.chunk_bytes // 4)

    @property
    def slot_words(self) -> int:
        """32-bit words of one slot: the number of keys of a fingerprint."""
        return self.chunks * self.words_per_chunk

    @property
    def present_slots(self) -> int:
        """How many slots of each page have bytes."""
        return self.page_size if self.present is None else self.present

    def has_bytes(self, slots: Tensor) -> Tensor:
        """Whether each of ``slots`` (integer ``[n]``) has bytes in the tensor: bool ``[n]``."""
        return slots % self.page_size < self.present_slots

    @property
    def address(self) -> int:
        """Device address of slot 0, chunk 0."""
        return self.tensor.data_ptr() + self.offset_bytes

    @property
    def alignment(self) -> int:
        """The largest of 16, 4 and 1 that divides every chunk's address and length."""
        places = (self.address, self.page_stride_bytes, self.slot_stride_bytes, self.chunk_stride_bytes)
        bits = reduce(or_, places, self.chunk_bytes)
        return 16 if not bits & 15 else 4 if not bits & 3 else 1

    def let_go(self) -> None:
        """Releases the tensor when the engine gives it up: an empty tensor of the same type and device takes its
        place."""
        object.__setattr__(self, "tensor", _nothing(self.tensor.dtype, self.tensor.device))

    def first_bytes(self, count: int) -> "KVSource":
        """A copy of the source, cut to the first ``count`` bytes of each slot's first chunk."""
        return replace(self, chunks=1, chunk_stride_bytes=0, chunk_bytes=min(self.chunk_bytes, count))

    def reach_bytes(self, slots: int) -> int:
        """Bytes from the tensor's start to the end of the last of ``slots`` slots; 0 where none has bytes."""
        pages = -(-slots // self.page_size)
        present = self.present_slots
        if present == 0:
            return 0
        # The last page may be cut short; then the whole page before it can reach further.
        last_slots = [(pages - 1, min(slots - (pages - 1) * self.page_size, present) - 1)]
        if pages > 1:
            last_slots.append((pages - 2, present - 1))
        return (
            self.offset_bytes
            + max(page * self.page_stride_bytes + i * self.slot_stride_bytes for page, i in last_slots)
            + (self.chunks - 1) * self.chunk_stride_bytes
            + self.chunk_bytes
        )

    def require_slots(self, slots: int) -> None:
        """Raises `AttachError` if ``slots`` slots do not fit the tensor's storage."""
        end = self.reach_bytes(slots)
        storage = self.tensor.untyped_storage()
        have = storage.nbytes() - (self.tensor.data_ptr() - storage.data_ptr())
        if end > have:
            raise AttachError(
                f"{self.name}: {slots} slots need {end} bytes from the tensor's start, its storage has {have}; "
                f"check slot count and strides of {self}"
            )


@lru_cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor: one for all sources, since a cache has many."""
    return torch.empty(0, dtype=dtype, device=device)


class Placement(NamedTuple):
    """Strides of a `KVSource` in another tensor than its own, as fields of `KVSource`."""

    page_stride_bytes: int
    slot_stride_bytes: int
    chunk_stride_bytes: int
    present: int


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """One guarded set of KV slots with one index space.

    ``slot_map`` (int32 or int64, ``[full slots + 1]``) turns the table's slots into the region's: a sliding-window pool
    beside a full one. ``null_slot`` is the first of ``null_slots`` padding slots (more than one where an engine pads
    with a block), never a live token's (None: every slot is live). ``null_reads``: number of padding slots, from the
    first on, that attention may read; the rest are only written (None: all may be read).
    ``tokens_per_slot``: more than 1 for `COMPRESSED`. ``window_tokens``: a token attends to itself and the
    ``window_tokens - 1`` tokens before; required for `WINDOW`. ``chunked``: to itself and those before in its own chunk
    of ``window_tokens`` tokens instead (chunked local attention).
    ``group_tokens`` and ``overlap_tokens``: see `RING`, where the first is required. ``page_ring``: ``(slots, rows)``
    where each page of ``slots`` slots, as numbered by table and map, is a ring of ``rows`` slots of the region: number
    ``n`` is slot ``n // slots * rows + n % rows``. A page begins at a position divisible by ``slots``. None: the rings
    are those of the table (`SlotTable.ring_slots`). ``encoded``: positions count states of an encoder, of which
    cross-attention has K and V, not tokens.

    Raises `AttachError` if a source does not fit, devices differ, or there are no sources.
    """

    name: str
    slots: int
    sources: tuple[KVSource, ...]
    kind: RegionKind = RegionKind.FULL
    window_tokens: int | None = None
    slot_map: Tensor | None = field(default=None, repr=False)
    null_slot: int | None = None
    null_slots: int = 1
    null_reads: int | None = None
    tokens_per_slot: int = 1
    group_tokens: int = 0
    overlap_tokens: int = 0
    page_ring: tuple[int, int] | None = None
    encoded: bool = False
    chunked: bool = False

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise AttachError(f"region {self.name!r}: slots must be at least 1, got {self.slots}")
        if not self.sources:
            raise AttachError(f"region {self.name!r} has no sources; give at least one KVSource")
        if (self.kind is RegionKind.WINDOW) != (self.window_tokens is not None):
            raise AttachError(
                f"region {self.name!r}: window_tokens goes with kind=WINDOW, got kind={self.kind.value} and "
                f"window_tokens={self.window_tokens}"
            )
        if self.window_tokens is not None and self.window_tokens < 1:
            raise AttachError(f"region {self.name!r}: window_tokens must be at least 1, got {self.window_tokens}")
        if self.chunked and self.window_tokens is None:
            raise AttachError(f"region {self.name!r}: chunked goes with kind=WINDOW, got kind={self.kind.value}")
        if (self.kind is RegionKind.COMPRESSED) != (self.tokens_per_slot > 1):
            raise AttachError(
                f"region {self.name!r}: tokens_per_slot above 1 goes with kind=COMPRESSED, got kind={self.kind.value} "
                f"and tokens_per_slot={self.tokens_per_slot}"
            )
        self._require_ring()
        self._require_null_slots()
        names = [s.name for s in self.sources]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise AttachError(f"region {self.name!r}: sources must have different names, got twice: {twice}")
        for source in self.sources:
            if source.tensor.device != self.device:
                raise AttachError(
                    f"region {self.name!r}: source {source.name} is on {source.tensor.device}, the first one on "
                    f"{self.device}; a region lives on one device"
                )
            source.require_slots(self.slots)
        if self.slot_map is not None:
            require_index_tensor(f"region {self.name!r}: slot_map", self.slot_map, self.device, dims=1)

    @property
    def device(self) -> torch.device:
        """Device of the guarded bytes."""
        return self.sources[0].tensor.device

    @property
    def null_range(self) -> range:
        """The padding slots; empty where there are none."""
        return range(0) if self.null_slot is None else range(self.null_slot, self.null_slot + self.null_slots)

    @property
    def attention_window(self) -> int:
        """Number of positions read by attention, counted back from and including the next position; 0: all of them. In
        a `RING`, counted back from the first position of the next position's group."""
        if self.kind is RegionKind.RING:
            return self.overlap_tokens + 1
        return 2 if self.kind is RegionKind.STATE else self.window_tokens or 0

    def passed(self, tokens: Count) -> Count:
        """How many positions of a sequence of ``tokens`` no later token attends to: those before the window. So it is
        the first position read. Not for a `RING`, where groups decide."""
        window = self.attention_window
        if not window:
            return tokens * 0
        first = tokens - tokens % window if self.chunked else tokens - (window - 1)
        return first * (first > 0)

    @property
    def slot_bytes(self) -> int:
        """Guarded bytes of one slot, all sources together."""
        return sum(s.slot_bytes for s in self.sources)

    @property
    def pool_bytes(self) -> int:
        """Guarded bytes of all slots."""
        return self.slots * self.slot_bytes

    def slots_of(self, numbers: Tensor) -> Tensor:
        """This region's slot of each of ``numbers`` (integer ``[n]``, on the pool's device), as the engine's tables
        number slots: int64 ``[n]``, -1 where the region has none (padding, evicted from a window, beyond the pool).
        Never waits for the device."""
        slot, status = self.resolve(numbers)
        return torch.where(status == Status.OK, slot, -1)

    def resolve(self, numbers: Tensor, pool_page: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Slot and `Status` of each of ``numbers`` (integer ``[n]``), numbered as in the engine's tables and write
        lists: int64 ``[n]`` each. Where the status isn't OK, the slot is the number found. ``pool_page``: see
        `SlotTable`. Never waits for the device."""
        slot, lost = self.locate(numbers, pool_page)
        return slot, self.status_of(slot, lost)

    def locate(self, numbers: Tensor, pool_page: tuple[int, int] | None = None) -> tuple[Tensor, Tensor | None]:
        """The first half of `resolve`, for a later `status_of`: the slot of each of ``numbers``, and whether a number
        leads nowhere (beyond the map, or to a pool page's rows of another region), bool ``[n]``, None where no number
        can."""
        slot, lost = numbers.long(), None
        if self.tokens_per_slot > 1:
            slot = torch.where(slot < 0, slot, slot // self.tokens_per_slot)
        if pool_page is not None or self.slot_map is not None:
            named = found = slot >= 0
            if pool_page is not None:
                rows, slots = pool_page
                found = found & (slot % rows < slots)
                slot = torch.where(found, slot // rows * slots + slot % rows, slot)
            if self.slot_map is not None:
                found = found & (slot < len(self.slot_map))
                slot = torch.where(found, self.slot_map[torch.where(found, slot, 0)].long(), slot)
            lost = named & ~found
        if self.page_ring is not None:
            slot = self.rows(slot) if lost is None else torch.where(lost, slot, self.rows(slot))
        return slot, lost

    def status_of(self, slots: Tensor, lost: Tensor | None = None) -> Tensor:
        """`Status` of each of ``slots`` (int64 ``[n]``, the region's own numbers, on any device): int64 ``[n]``.
        ``lost``: see `locate`."""
        null = slots < 0
        if self.null_slot is not None:
            null |= (slots >= self.null_range.start) & (slots < self.null_range.stop)
        beyond = slots >= self.slots if lost is None else lost | (slots >= self.slots)
        return torch.where(beyond, Status.RANGE, torch.where(null, Status.NULL, Status.OK))

    def rows(self, slots: Tensor) -> Tensor:
        """The slots of a ``page_ring`` for ``slots`` as numbered by table and map; without a page ring, the same
        numbers. Negative numbers stay unchanged."""
        if self.page_ring is None:
            return slots
        page, rows = self.page_ring
        return torch.where(slots < 0, slots, slots // page * rows + slots % rows)

    def _require_null_slots(self) -> None:
        """Raises `AttachError` unless the padding slots are slots of the region, and some are left."""
        null = self.null_range
        if self.null_slots < 1 or (self.null_slot is None and self.null_slots > 1):
            raise AttachError(
                f"region {self.name!r}: null_slots counts the padding slots from null_slot on and is at least 1, got "
                f"null_slot={self.null_slot} and null_slots={self.null_slots}"
            )
        if self.null_reads is not None and not 0 <= self.null_reads <= len(null):
            raise AttachError(
                f"region {self.name!r}: null_reads counts some of the {len(null)} null slots, got {self.null_reads}"
            )
        if null and not 0 <= null.start < null.stop <= self.slots:
            which = f"{null.start}" if len(null) == 1 else f"{null.start} to {null.stop - 1}"
            raise AttachError(f"region {self.name!r}: null_slot {which} is not one of its {self.slots} slots")

    def _require_ring(self) -> None:
        """Raises `AttachError` unless the fields of a `RING` go together."""
        ring = self.kind is RegionKind.RING
        if ring != (self.group_tokens > 0) or self.overlap_tokens < 0 or (self.overlap_tokens and not ring):
            raise AttachError(
                f"region {self.name!r}: group_tokens and overlap_tokens go with kind=RING, got kind={self.kind.value}, "
                f"group_tokens={self.group_tokens} and overlap_tokens={self.overlap_tokens}"
            )
        if self.page_ring is None:
            return
        page, rows = self.page_ring
        if not ring or rows < 1 or page % rows or rows < self.group_tokens + self.overlap_tokens:
            raise AttachError(
                f"region {self.name!r}: page_ring must be (slots, rows) of a RING whose rows divide the slots and hold "
                f"a group and its overlap, got {self.page_ring} with group_tokens={self.group_tokens}, "
                f"overlap_tokens={self.overlap_tokens} and kind={self.kind.value}"
            )


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Unguarded KV memory, with the reason: reported at start-up, never silent.

    ``tensor``: exactly these bytes, as a tensor or a view, where known: `Coverage` and the audit then know the place,
    and not only the size.
    """

    name: str
    size_bytes: int
    reason: str
    tensor: Tensor | None = field(default=None, repr=False, compare=False)


INDEX_DTYPES = (torch.int32, torch.int64)


def require_tensor(what: str, value: object) -> None:
    """Raises `AttachError` unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise AttachError(f"{what} must be a tensor, got a {type(value).__name__}; make it one in the adapter")


def require_index_tensor(what: str, tensor: Tensor, device: torch.device, dims: int) -> None:
    """Raises `AttachError` unless ``tensor`` is int32 or int64 with ``dims`` dimensions, contiguous in the last, on
    ``device``."""
    if is_index_tensor(tensor, device, dims):
        return
    require_tensor(what, tensor)
    if tensor.dtype not in INDEX_DTYPES:
        raise AttachError(f"{what} must be int32 or int64, got {tensor.dtype}; convert it where it is made")
    if tensor.device != device:
        raise AttachError(f"{what} must be on {device} beside the pool, got {tensor.device}; copy it there")
    if tensor.dim() != dims:
        raise AttachError(f"{what} must have {dims} dimension(s), got shape {tuple(tensor.shape)}")
    raise AttachError(f"{what} must be contiguous in its last dimension, got strides {tensor.stride()}")


def is_index_tensor(tensor: Tensor, device: torch.device, dims: int) -> bool:
    """Whether ``tensor`` fulfils `require_index_tensor`, without the words."""
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype in INDEX_DTYPES
        and tensor.device == device
        and tensor.dim() == dims
        and (tensor.is_contiguous() or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1)
    )


def are_lists(tensors: Iterable[Tensor | None], device: torch.device) -> bool:
    """Whether every tensor of ``tensors`` is a contiguous index tensor of one dimension (`require_index_tensor`). One
    call for the several tensors of a forward's view."""
    for tensor in tensors:
        if tensor is not None and not (
            isinstance(tensor, Tensor)
            and tensor.dtype in INDEX_DTYPES
            and tensor.device == device
            and tensor.dim() == 1
            and tensor.is_contiguous()
        ):
            return False
    return True
