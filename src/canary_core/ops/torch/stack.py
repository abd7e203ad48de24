"""`Stack`: sources read together, and the report of wrong bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from canary_core.ops.mapping import Seen
from canary_core.ops.sources import SourceTable
from canary_core.ops.state import RegionState
from canary_core.ops.torch.ring import report
from canary_core.ops.upload import upload
from canary_core.records import Descriptor, Kind, Row
from canary_core.region import KVSource

MOST_WORDS = 1 << 22
"""Words read at a time: bounds the scratch memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Sources in one storage that differ only in their start: one call fingerprints all.

    like: one of the sources. columns, starts: int64 ``[g]``, indices among the region's sources and offsets of the
    first bytes in the storage. indices: ``columns`` on the host.
    """

    like: KVSource
    columns: Tensor
    starts: Tensor
    indices: tuple[int, ...]

    def words(self, slots: Tensor) -> Tensor:
        """The 32-bit words of ``slots`` (int64 ``[n]``), zero-extended: int64 ``[g, n, slot_words]``. A chunk's last
        word is padded with zero bytes."""
        source, device = self.like, slots.device
        storage = source.tensor.untyped_storage()
        inside = slots % source.page_size * source.slot_stride_bytes
        first = slots // source.page_size * source.page_stride_bytes + inside
        chunk = torch.arange(source.chunks, device=device) * source.chunk_stride_bytes
        first = self.starts[:, None, None] + first[:, None] + chunk  # [g, n, chunks]
        width, shape = source.words_per_chunk, (len(self.starts), len(slots), source.slot_words)
        if source.alignment >= 4:
            flat = torch.empty(0, dtype=torch.int32, device=device).set_(storage, 0, (storage.nbytes() // 4,), (1,))
            index = (first // 4)[..., None] + torch.arange(width, device=device)
            return flat[index].long().view(shape) & 0xFFFFFFFF
        bytes_ = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
        offset = torch.arange(width * 4, device=device)
        there = offset < source.chunk_bytes
        byte = bytes_[first[..., None] + torch.where(there, offset, 0)].long() * there
        return (byte.view(*shape, 4) << torch.tensor([0, 8, 16, 24], device=device)).sum(3)

    def fold(self, state: RegionState, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Fingerprint of each slot in each source, ``salt + sum(word * key)``, int64 ``[g, n]``; and whether a float
        has all exponent bits set, bool ``[g, n]``."""
        salts = state.sources.salts[self.columns][:, None]
        descriptors = state.sources.descriptors[self.columns][:, None, None]
        exponent, increment, carry = (descriptors[..., d] for d in Descriptor if d >= Descriptor.EXPONENT)
        keys = state.sources.keys[: self.like.slot_words]
        values, odd = [], []
        for piece in slots.split(max(MOST_WORDS // (len(self.starts) * self.like.slot_words), 1)):
            words = self.words(piece)
            values.append(salts + (words * keys).sum(2))
            odd.append((((words & exponent) + increment) & carry).any(2))
        return torch.cat(values, 1), torch.cat(odd, 1)


def stacks(state: RegionState) -> tuple[Stack, ...]:
    """The region's sources in stacks; made anew after the region was bound to other tensors."""
    known = _stacks.get(state.sources)
    if known is not None and known[0] is state.sources.bound:
        return known[1]
    alike: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for column, s in enumerate(state.sources):
        storage = s.tensor.untyped_storage()
        geometry = (
            s.page_size,
            s.page_stride_bytes,
            s.slot_stride_bytes,
            s.chunks,
            s.chunk_stride_bytes,
            s.chunk_bytes,
        )
        key = (storage.data_ptr(), *geometry, s.present_slots, s.alignment >= 4)
        alike.setdefault(key, []).append((column, s.address - storage.data_ptr()))
    device = state.records.device
    found = tuple(
        Stack(
            state.sources[members[0][0]],
            upload([column for column, _ in members], device),
            upload([start for _, start in members], device),
            tuple(column for column, _ in members),
        )
        for members in alike.values()
    )
    _stacks[state.sources] = (state.sources.bound, found)
    return found


_stacks: WeakKeyDictionary[SourceTable, tuple[tuple[KVSource, ...], tuple[Stack, ...]]] = WeakKeyDictionary()
"""The last result of `stacks`, with its sources."""


def report_bytes(
    state: RegionState,
    seen: Seen,
    stack: Stack,
    findings: Mapping[Kind, Tensor] | Mapping[int, Tensor],
    about: Mapping[Row, Tensor],
) -> None:
    """Reports one finding for each place and source of a mask of ``findings``, bool ``[g, n]``. Fields of ``about`` are
    one number for all, or ``[n]``, or ``[g, n]`` where they differ by source."""
    for kind, masks in findings.items():
        if not bool(masks.any()):
            continue
        for i, source in enumerate(stack.columns.tolist()):
            mask = masks[i]
            stored = state.fingerprints[torch.where(seen.usable, seen.slot, 0), source]
            own = {word: value[i] if value.dim() == 2 else value for word, value in about.items()}
            fields: dict[Row, Tensor] = {**seen.fields(), Row.STORED_VALUE: stored, **own}
            chosen = {word: value[mask] if value.dim() else value for word, value in fields.items()}
            report(state.shared, kind, seen.slot[mask], {**chosen, Row.REGION: state.index, Row.SOURCE: source})
