"""`SourceTable`: the fingerprinted sources of a region, and their description for kernels."""

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

import torch
from torch import Tensor

from canary_core.config import CanaryConfig
from canary_core.errors import AttachError
from canary_core.layers import of_guarded_layers
from canary_core.ops.upload import pinned, upload
from canary_core.records import DESCRIPTOR_WORDS, LOST_WRITE_BYTES, Descriptor
from canary_core.region import PARTIAL_BYTES, KVSource, Placement, Region, Role

if TYPE_CHECKING:
    from canary_core.ops.sums import Sums
    from canary_core.ops.turns import Turns

NARROW_WORDS = 16
"""Most words in a slot of a narrow source that shares a launch with a wide one: all are read at once."""

# Exponent bits, lowest exponent bit and the bit above, of one 32-bit word full of floats. For e4m3fn only the mantissa
# full of ones is NaN, so its seven low bits count as exponent. Formats with NaN at -0 (fnuz) have no such pattern.
_FLOAT_BITS: dict[torch.dtype, tuple[int, int, int]] = {
    torch.float32: (0x7F800000, 0x00800000, 0x80000000),
    torch.bfloat16: (0x7F807F80, 0x00800080, 0x80008000),
    torch.float16: (0x7C007C00, 0x04000400, 0x80008000),
    torch.float8_e4m3fn: (0x7F7F7F7F, 0x01010101, 0x80808080),
    torch.float8_e5m2: (0x7C7C7C7C, 0x04040404, 0x80808080),
}


def type_of(source: KVSource) -> torch.dtype | None:
    """The type of a source's numbers, None where unknown."""
    return source.dtype if source.scaled is None else source.scaled


class SourceShape(NamedTuple):
    """The compile-time constants of a source in a kernel."""

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
    """Sources of one kernel launch: ``columns[i, j]`` is the index, among the region's sources, of the i-th source of
    shape ``shapes[j]``; int32 ``[n, shapes]`` on the device.

    A program takes one row: one source, or a wide and a narrow source together, such as K and its scales. With
    ``parts`` a row is a group of `Sums`: its number, and the indices of up to so many sources of one shape, then -1.
    """

    shapes: tuple[SourceShape, ...]
    columns: torch.Tensor
    parts: int = 0


class Label(NamedTuple):
    """A source, or a group of `Sums`, in findings: ``layer`` is None for several, whose names are ``several``, and
    ``half`` where they are of more than one."""

    name: str
    layer: int | None
    half: str | None
    several: tuple[str, ...] = ()

    @classmethod
    def of(cls, sources: Sequence[KVSource]) -> "Label":
        """Such as ``k.3``, ``k.0..15`` for several of one half, or ``k+v.0..17``."""
        first = sources[0]
        if len(sources) == 1:
            return cls(first.name, first.layer, first.half)
        halves = list(dict.fromkeys(source.half for source in sources))
        begin, *_, end = (s.name.removeprefix(f"{s.half}.") for s in sources if s.half == first.half)
        name = f"{'+'.join(halves)}.{begin}..{end}"
        return cls(name, None, first.half if len(halves) == 1 else None, tuple(source.name for source in sources))


class SourceTable(Sequence[KVSource]):
    """The fingerprinted sources of a region, in the order of the fingerprints: a sequence of `KVSource`.

    With ``CANARY_BYTES=partial`` each is cut to its first bytes, with ``off`` there are none; with ``CANARY_LAYERS``
    there are those of some layers. Tensors keep their addresses for life, so captured graphs stay valid, also after
    `rebind`.

    bound: the sources, another tuple after each `rebind` or `rebind_alike`. descriptors: int64 ``[sources,
    DESCRIPTOR_WORDS]``, see `Descriptor`. keys: int64, one for each word of the longest slot, and salts: int64, one for
    each source, and then one for each column of `Sums`; at least one of each; and place_seed: int64 ``[1]``, see
    `hashing`: all of ``fingerprint_keys``. groups: sources of one launch each, for byte kernels.
    sums: how sources share fingerprints. columns: fingerprints of a slot. labels: of the
    sources, and then of the groups of `Sums`, by the index in findings; judged: those that have a fingerprint. Canary
    takes ``others`` bytes for a slot beside them.
    """

    def __init__(self, region: Region, config: CanaryConfig, others: float = 0.0) -> None:
        device = region.device
        self._region = region
        self._config = config
        self._bound: tuple[KVSource, ...] | None = _fingerprinted(region.sources, config)
        chosen = {s.name for s in self._bound}
        self._kept = [i for i, s in enumerate(region.sources) if s.name in chosen]
        """Indices among all sources of the region."""
        self._moved: tuple[Sequence[Tensor], Sequence[Placement]] = ((), ())
        self._turns: Turns | None = None
        self._unlike = False
        self._region_gone = False
        self.gone = False
        """Whether the engine has given the tensors up, see `let_go`."""
        self._rows = self._descriptors()
        # Neither is for a process without a guard.
        from canary_core.ops.fingerprint_keys import FingerprintKeys
        from canary_core.ops.sums import Sums

        self.fingerprint_keys = FingerprintKeys.of(config)
        self.keys = self.fingerprint_keys.words(max((s.slot_words for s in self), default=1), device)
        self.sums = Sums.of(self.bound, region, config, others)
        self.columns = self.sums.columns or len(self)
        groups = [[self.bound[i] for i in group] for group in self.sums.groups]
        self.labels = tuple(map(Label.of, [*([source] for source in self), *groups]))
        self.judged = self.labels[-len(groups) :]
        self.salts = self.fingerprint_keys.sources(max(len(self) + self.sums.columns, 1), device)
        self.place_seed = torch.full((1,), self.fingerprint_keys.of_places, dtype=torch.int64, device=device)
        self.descriptors = torch.zeros(len(self), DESCRIPTOR_WORDS, dtype=torch.int64, device=device)
        self.groups = source_groups(self.bound, device, self.sums)
        self._shapes = [SourceShape.of(s) for s in self]
        self.slot_bytes = sum(s.slot_bytes for s in self)
        """Fingerprinted bytes of one slot."""
        self._send()

    @property
    def bound(self) -> tuple[KVSource, ...]:
        """The sources. After `rebind_alike` made only where somebody asks: kernels go by the descriptors."""
        if self._bound is None:
            self._bound = () if self._turns is None else self._turns.moved(*self._moved)
        return self._bound

    def __len__(self) -> int:
        return self._rows.shape[0]

    def __iter__(self) -> Iterator[KVSource]:
        return iter(self.bound)

    @overload
    def __getitem__(self, index: int) -> KVSource: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[KVSource, ...]: ...

    def __getitem__(self, index: int | slice) -> KVSource | tuple[KVSource, ...]:
        return self.bound[index]

    @property
    def zeros(self) -> Tensor:
        """The fingerprints of a slot of zero bytes: int64 ``[columns]``."""
        return self.salts[: len(self)] if not self.sums else self.salts[len(self) :]

    def column_of(self, source: int) -> int:
        """The column with the first, or only, fingerprint of a source, by its index."""
        if not self.sums:
            return source
        return next(self.sums.width * number for number, group in enumerate(self.sums.groups) if source in group)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The sources, by index, of each of `judged`."""
        return tuple((i,) for i in range(len(self))) if not self.sums else self.sums.groups

    @property
    def firsts(self) -> slice:
        """The columns with the first, or only, fingerprint of each of `judged`."""
        return slice(0, self.columns, self.sums.width if self.sums else 1)

    @property
    def sure(self) -> Tensor:
        """Whether a write that leaves the bytes of each of `judged` as they were is lost: bool, on the device."""
        sure = self.descriptors[:, Descriptor.SURE] != 0
        return torch.stack([sure[group[0]] for group in self.sums.groups]) if self.sums else sure

    def columns_present(self, slots: Tensor) -> Tensor:
        """Whether each column's sources have bytes of each of ``slots``, int64 ``[n]``: bool ``[n, columns]``."""
        page_size, present = (self.descriptors[:, d] for d in (Descriptor.PAGE_SIZE, Descriptor.PRESENT))
        there = slots[:, None] % page_size < present
        if not self.sums:
            return there
        groups = [there[:, members].any(1) for members in self.sums.members]
        return torch.stack([mask for mask in groups for _ in range(self.sums.width)], 1)

    def changed(self, stored: Tensor, found: Tensor) -> list[int]:
        """Indices of the sources that explain the differences between two rows of fingerprints, int64 ``[columns]`` on
        the host."""
        if self.sums:
            return self.sums.changed(stored, found)
        differing: list[int] = (stored != found).nonzero()[:, 0].tolist()
        return differing

    @property
    def memory_bytes(self) -> int:
        """Device memory of ours for the sources."""
        return self.descriptors.nbytes + self.keys.nbytes + self.salts.nbytes + self.place_seed.nbytes

    def groups_of(self, columns: Sequence[int]) -> tuple[SourceGroup, ...]:
        """The parts of `groups` with sources of ``columns`` (indices) only. Waits for the device."""
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
        new = _fingerprinted(sources, self._config)
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
            self.groups = source_groups(new, self.descriptors.device, self.sums)
        self._bound, self._shapes, self.gone = new, shapes, False
        self._moved, self._turns = ((), ()), None
        self._rows = self._descriptors()
        self._send()
        return reshaped

    def rebind_alike(self, tensors: Sequence[Tensor], places: Sequence[Placement]) -> bool:
        """`rebind` at a fraction of the cost: source ``i`` of the region moves to ``tensors[i]``, laid out as
        ``places[i % len(places)]``. Returns whether the move was made: only if the tensors of one place agree in shape,
        strides, type and device, the sources of one place differ in tensor and name only, and kernels stay the same."""
        count = len(places)
        if self._config.bytes != "all" or not count or len(tensors) != len(self._region.sources):
            return False
        if len(tensors) != len(self):
            if any(i % count != mine % count for mine, i in enumerate(self._kept)):
                return False
            tensors = [tensors[i] for i in self._kept]
        if not len(self) or len(self) % count:
            return False
        from canary_core.ops.turns import BEST_ALIGNMENT, Turns, bits

        turns = self._turns
        addresses = [tensor.data_ptr() for tensor in tensors]
        if turns is None or turns.turns != count:
            if self._unlike or bits(addresses, places) % BEST_ALIGNMENT:
                return False
            turns = self._turns = Turns.of(self.bound, count, self._rows)
            self._unlike = not turns.repeat
        if not turns.fit(tensors, addresses, places, self._region.slots):
            return False
        # `torch.tensor` takes several times as long.
        turns.rows_but_addresses.copy_(torch.frombuffer(turns.words(places), dtype=torch.int64).view(count, -1))
        turns.addresses.copy_(torch.frombuffer(array("q", addresses), dtype=torch.int64))
        self._send()
        self._bound, self._moved, self.gone = None, (tuple(tensors), tuple(places)), False
        return True

    def let_go(self) -> None:
        """Releases the tensors when the engine gives them up, here and in the region. No op may read them until
        `rebind`."""
        if self.gone:
            return
        if self._bound is None and self._turns is not None:
            self._bound = self._turns.sources
        else:
            for source in self.bound:
                source.let_go()
        if not self._region_gone:
            for source in self._region.sources:
                source.let_go()
        self._moved, self.gone, self._region_gone = ((), ()), True, True

    def _descriptors(self) -> Tensor:
        """Descriptors of all sources, on the host."""
        rows = [descriptor(s, self._config.non_finite) for s in self.bound]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, DESCRIPTOR_WORDS)

    def _send(self) -> None:
        """Sends the descriptors to the device, from pinned memory of their own, so that the host waits neither now nor
        before the next change."""
        if len(self):
            self.descriptors.copy_(pinned(self._rows, self.descriptors.device), non_blocking=True)


def source_groups(
    sources: Sequence[KVSource], device: torch.device, sums: "Sums | None" = None
) -> tuple[SourceGroup, ...]:
    """The sources by shape, in order of first appearance. A shape shares its group with the next much narrower shape of
    as many sources; those of ``sums`` share with none."""
    if sums:
        return _summed_groups(sources, device, sums)
    by_shape: dict[SourceShape, list[int]] = {}
    for index, source in enumerate(sources):
        by_shape.setdefault(SourceShape.of(source), []).append(index)
    groups = []
    while by_shape:
        shape, indices = next(iter(by_shape.items()))
        most = min(NARROW_WORDS, shape.words // 4)
        narrow = next((s for s, i in by_shape.items() if s.words <= most and len(i) == len(indices)), None)
        shapes = (shape,) if narrow is None else (shape, narrow)
        columns = torch.tensor([by_shape.pop(s) for s in shapes], dtype=torch.int32, device="cpu").T.contiguous()
        groups.append(SourceGroup(shapes, upload(columns, device)))
    return tuple(groups)


def _summed_groups(sources: Sequence[KVSource], device: torch.device, sums: "Sums") -> tuple[SourceGroup, ...]:
    by_shape: dict[SourceShape, list[list[int]]] = {}
    for number, group in enumerate(sums.groups):
        by_shape.setdefault(SourceShape.of(sources[group[0]]), []).append([number, *group])
    groups = []
    for shape, rows in by_shape.items():
        parts = max(map(len, rows)) - 1
        padded = [row + [-1] * (1 + parts - len(row)) for row in rows]
        columns = torch.tensor(padded, dtype=torch.int32, device="cpu")
        groups.append(SourceGroup((shape,), upload(columns, device), parts))
    return tuple(groups)


def descriptor(source: KVSource, non_finite: bool) -> list[int]:
    """A source as `Descriptor` words. ``non_finite``: whether floats are checked, if the source has any."""
    exponent, increment, carry = _FLOAT_BITS.get(source.dtype, (0, 0, 0)) if source.dtype and non_finite else (0, 0, 0)
    sure = source.role is Role.DATA and source.slot_bytes >= LOST_WRITE_BYTES
    return [
        source.address, source.page_size, source.page_stride_bytes, source.slot_stride_bytes, source.chunks,
        source.chunk_stride_bytes, source.chunk_bytes, source.present_slots, int(sure), exponent, increment, carry,
    ]  # fmt: skip


def _fingerprinted(sources: Sequence[KVSource], config: CanaryConfig) -> tuple[KVSource, ...]:
    """The sources of the layers that ``CANARY_LAYERS`` names, cut as ``CANARY_BYTES`` says."""
    if config.bytes == "off":
        return ()
    chosen = of_guarded_layers(sources, config)
    return tuple(s.first_bytes(PARTIAL_BYTES) for s in chosen) if config.bytes == "partial" else chosen
