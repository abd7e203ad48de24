"""`SourceTable`: the fingerprinted sources of a region, and what kernels must know of them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import torch

from canary_core.config import CanaryConfig
from canary_core.errors import AttachError
from canary_core.ops import hashing
from canary_core.records import DESCRIPTOR_WORDS, LOST_WRITE_BYTES
from canary_core.region import PARTIAL_BYTES, KVSource, Region, Role

NARROW_WORDS = 16
"""Most words a slot of a narrow source that shares a launch with a wide one: they are read at once."""

# Exponent bits, lowest exponent bit and the bit above, of one 32-bit word full of floats. For e4m3fn only the mantissa
# full of ones is NaN, so its seven low bits count as exponent. Formats with NaN at -0 (fnuz) have no such pattern.
_FLOAT_BITS: dict[torch.dtype, tuple[int, int, int]] = {
    torch.float32: (0x7F800000, 0x00800000, 0x80000000),
    torch.bfloat16: (0x7F807F80, 0x00800080, 0x80008000),
    torch.float16: (0x7C007C00, 0x04000400, 0x80008000),
    torch.float8_e4m3fn: (0x7F7F7F7F, 0x01010101, 0x80808080),
    torch.float8_e5m2: (0x7C7C7C7C, 0x04040404, 0x80808080),
}


class SourceShape(NamedTuple):
    """What of a source is a compile-time constant in a kernel."""

    page_size: int
    chunks: int
    chunk_bytes: int
    alignment: int

    @classmethod
    def of(cls, source: KVSource) -> "SourceShape":
        """The shape of ``source``."""
        return cls(source.page_size, source.chunks, source.chunk_bytes, source.alignment)

    @property
    def words(self) -> int:
        """Words of one slot, each chunk's last one padded."""
        return self.chunks * -(-self.chunk_bytes // 4)


class SourceGroup(NamedTuple):
    """Sources that one kernel launch takes together: ``columns[i, j]`` is the index, among the region's sources, of the
    i-th one of shape ``shapes[j]``; int32 ``[n, shapes]`` on the device.

    A program takes one row of them: one source, or a wide one and a narrow one that goes with it, such as its scales.
    """

    shapes: tuple[SourceShape, ...]
    columns: torch.Tensor


class SourceTable(Sequence[KVSource]):
    """The fingerprinted sources of a region, in the order of their fingerprints: a sequence of `KVSource`.

    With ``CANARY_BYTES=partial`` each is cut to its first bytes, with ``off`` there are none. Tensors keep their
    addresses for life, so captured graphs stay valid, `rebind` included.

    bound: the sources, another tuple after each `rebind`. descriptors: int64 ``[sources, DESCRIPTOR_WORDS]``, see
    `Descriptor`. keys: int64, one for each word of the longest slot, and salts: int64 ``[sources]``, at least one of
    each, see `hashing`. groups: sources that byte kernels take in one launch.
    """

    def __init__(self, region: Region, config: CanaryConfig) -> None:
        device = region.device
        self._region = region
        self._config = config
        self.bound = _fingerprinted(region.sources, config.bytes)
        self.keys = hashing.keys(max((s.slot_words for s in self), default=1), device)
        self.salts = hashing.salts(max(len(self), 1), device)
        self.descriptors = torch.zeros(len(self), DESCRIPTOR_WORDS, dtype=torch.int64, device=device)
        self.groups = source_groups(self.bound, device)
        self._shapes = [SourceShape.of(s) for s in self]
        self.slot_bytes = sum(s.slot_bytes for s in self)
        """Fingerprinted bytes of one slot."""
        self._describe()

    def __len__(self) -> int:
        return len(self.bound)

    def __iter__(self) -> Iterator[KVSource]:
        return iter(self.bound)

    @overload
    def __getitem__(self, index: int) -> KVSource: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[KVSource, ...]: ...

    def __getitem__(self, index: int | slice) -> KVSource | tuple[KVSource, ...]:
        return self.bound[index]

    @property
    def memory_bytes(self) -> int:
        """Device memory of ours for the sources."""
        return self.descriptors.nbytes + self.keys.nbytes + self.salts.nbytes

    def groups_of(self, columns: Sequence[int]) -> tuple[SourceGroup, ...]:
        """The parts of `groups` that have only sources of ``columns``, indices. Waits for the device."""
        parts = []
        for group in self.groups:
            rows = [row for row in group.columns.tolist() if set(row) <= set(columns)]
            if rows:
                parts.append(SourceGroup(group.shapes, group.columns.new_tensor(rows)))
        return tuple(parts)

    def rebind(self, sources: Sequence[KVSource]) -> bool:
        """New addresses for the same sources; copies the descriptors to the device. Gives whether launches must be made
        anew, since shapes differ that kernels were compiled for. Raises `AttachError` if sources differ in more than
        tensor, strides and presence."""
        new = _fingerprinted(sources, self._config.bytes)
        region = self._region
        for old, fresh in zip(self, new, strict=len(new) == len(self)):
            if (old.name, old.slot_words, old.page_size) != (fresh.name, fresh.slot_words, fresh.page_size):
                raise AttachError(
                    f"region {region.name!r}: rebind must keep name, size and page size of {old.name}, got {fresh}"
                )
            fresh.require_slots(region.slots)
        if len(new) != len(self):
            raise AttachError(f"region {region.name!r}: rebind needs all {len(self)} sources, got {len(new)}")
        shapes = [SourceShape.of(s) for s in new]
        reshaped = shapes != self._shapes
        if reshaped:
            self.groups = source_groups(new, self.descriptors.device)
        self.bound, self._shapes = new, shapes
        self._describe()
        return reshaped

    def _describe(self) -> None:
        rows = [descriptor(s, self._config.non_finite) for s in self]
        if rows:
            # From pinned memory, so that the host does not wait.
            host = torch.tensor(rows, dtype=torch.int64, pin_memory=self.descriptors.is_cuda)
            self.descriptors.copy_(host, non_blocking=True)


def source_groups(sources: Sequence[KVSource], device: torch.device) -> tuple[SourceGroup, ...]:
    """The sources by shape, in order of first appearance. A shape shares its group with the next one that is narrow
    beside it and has as many sources."""
    by_shape: dict[SourceShape, list[int]] = {}
    for index, source in enumerate(sources):
        by_shape.setdefault(SourceShape.of(source), []).append(index)
    groups = []
    while by_shape:
        shape, indices = next(iter(by_shape.items()))
        most = min(NARROW_WORDS, shape.words // 4)
        narrow = next((s for s, i in by_shape.items() if s.words <= most and len(i) == len(indices)), None)
        shapes = (shape,) if narrow is None else (shape, narrow)
        columns = torch.tensor([by_shape.pop(s) for s in shapes], dtype=torch.int32, device=device)
        groups.append(SourceGroup(shapes, columns.T.contiguous()))
    return tuple(groups)


def descriptor(source: KVSource, non_finite: bool) -> list[int]:
    """A source as `Descriptor` words. ``non_finite``: whether its floats are looked at, if it has any."""
    exponent, increment, carry = _FLOAT_BITS.get(source.dtype, (0, 0, 0)) if source.dtype and non_finite else (0, 0, 0)
    sure = source.role is Role.DATA and source.slot_bytes >= LOST_WRITE_BYTES
    return [
        source.address, source.page_size, source.page_stride_bytes, source.slot_stride_bytes, source.chunks,
        source.chunk_stride_bytes, source.chunk_bytes, source.present_slots, int(sure), exponent, increment, carry,
    ]  # fmt: skip


def _fingerprinted(sources: Sequence[KVSource], share: str) -> tuple[KVSource, ...]:
    """The sources as ``CANARY_BYTES`` wants them fingerprinted."""
    if share == "off":
        return ()
    if share == "partial":
        return tuple(s.first_bytes(PARTIAL_BYTES) for s in sources)
    return tuple(sources)
