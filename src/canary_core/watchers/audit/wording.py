"""The result of an audit, in sentences that point at the adapter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from canary_core.region import KVSource, Region
from canary_core.watchers.audit.memory import Storage
from canary_core.wording import listed, numbered, runs

Suspect = Literal["PoolAdapter", "BatchAdapter", "PoolAdapter or BatchAdapter"]
"""The part of an adapter to blame: the description of memory, of a forward, or one of the two."""

SHOWN = 6
"""Most numbers or names in a sentence."""


class Problem(NamedTuple):
    """One problem, in a sentence, and the suspect."""

    suspect: Suspect
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class ClaimedWrites:
    """The slots of ``region`` named as written by a view, int64 ``[n]``; whether each source changed there, and whether
    the source has bytes there, bool ``[n, sources]``. In host memory."""

    region: Region
    slots: Tensor
    changed: Tensor
    present: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Stray:
    """``count`` unclaimed bytes of ``storage`` changed, the first of them at ``places`` (int64 ``[n]``, offsets).
    ``described``: by region, the sources within the storage, and each place's slot (-1: none)."""

    storage: Storage
    count: int
    places: Tensor
    described: Mapping[str, Sequence[tuple[KVSource, Tensor]]]

    @property
    def undescribed(self) -> Tensor:
        """Places outside of all sources."""
        known = torch.zeros_like(self.places, dtype=torch.bool)
        for sources in self.described.values():
            for _, slots in sources:
                known |= slots >= 0
        return self.places[~known]


def elsewhere(region: Region, sources: Sequence[KVSource]) -> Problem:
    """Sources lie outside of the engine's memory."""
    return Problem(
        "PoolAdapter",
        f"{_sources(sources)} of region {region.name!r} {_verb(sources, 'points', 'point')} at memory that is none of "
        "the engine's tensors: does the adapter describe a copy, or tensors that the engine has replaced since?",
    )


def out_of_range(region: Region, numbers: Sequence[int]) -> Problem:
    """The view writes where there are no slots."""
    return Problem(
        "PoolAdapter or BatchAdapter",
        f"the view names {numbered(len(numbers), 'written slot')} that region {region.name!r} does not have (it has "
        f"0 to {region.slots - 1}): {_numbers(numbers)}; do table, page size or write_slots belong to another region?",
    )


def unclaimed(strays: Sequence[Stray], writes: Sequence[ClaimedWrites], any_written: bool) -> Iterator[Problem]:
    """Unclaimed bytes changed."""
    for stray in strays:
        yield from _undescribed(stray, writes)
    regions: dict[str, list[tuple[KVSource, Tensor]]] = {}
    for stray in strays:
        for name, sources in stray.described.items():
            regions.setdefault(name, []).extend((source, slots[slots >= 0]) for source, slots in sources)
    touched = {name: [(s, slots) for s, slots in found if len(slots)] for name, found in regions.items()}
    for write in writes:
        found = touched.get(write.region.name)
        if found and not any_written:
            total = sum(len(slots) for _, slots in found)
            yield Problem(
                "BatchAdapter",
                f"the view named no written slot, yet {numbered(total, 'byte')} changed in "
                f"{_slots(write.region, found)}, in {_sources([s for s, _ in found])}: is the view None, or made for "
                "another forward?",
            )
        elif found:
            yield _unnamed(write, found)


def _undescribed(stray: Stray, writes: Sequence[ClaimedWrites]) -> Iterator[Problem]:
    """Changed bytes outside of all sources, by the engine's tensor."""
    left = stray.undescribed
    while len(left):
        found = stray.storage.tensor_at(int(left[0]))
        if found is None:
            yield Problem(
                "PoolAdapter",
                f"the forward changed {numbered(len(left), 'byte')} beside the tensors {stray.storage.names}, in the "
                "storage that holds them: does pool_tensors() leave a tensor out?",
            )
            return
        name, tensor = found
        first = tensor.data_ptr() - stray.storage.start
        inside = _inside(tensor, left - first)
        if not bool(inside[0]):
            inside = torch.zeros_like(inside).index_fill_(0, torch.tensor([0], device="cpu"), True)
        mine, left = left[inside] - first, left[~inside]
        known = _known(stray, tensor, first, writes)
        more = "at least " if stray.count > len(stray.places) else ""
        about = (
            f"the forward changed {more}{numbered(len(mine), 'byte')} of {name!r} (shape {list(tensor.shape)}) that no "
            "region describes"
        )
        if len(known):
            yield Problem("PoolAdapter", f"{about}: {_where(tensor, mine, known)} in PoolAdapter.regions()?")
        else:
            yield Problem(
                "PoolAdapter",
                f"{about}, nor anything else of it: is that layer or half (K, V, a scale) missing in "
                "PoolAdapter.regions()?",
            )


def _where(tensor: Tensor, places: Tensor, known: Tensor) -> str:
    """Indices of ``tensor``'s dimensions at the bytes ``places``, in the dimensions where they differ from the
    ``known``, described ones; and the part that may be missing."""
    mine, theirs = _coordinates(tensor, places), _coordinates(tensor, known)
    sets = [(d, sorted(set(a.tolist())), set(b.tolist())) for d, (a, b) in enumerate(zip(mine, theirs, strict=True))]
    partly = [(d, own) for d, own, _ in sets if len(own) < tensor.shape[d]]
    telling = [(d, own) for d, own, other in sets if other and not other & set(own)]
    shown = telling or partly
    where = (
        ", ".join(f"dim {d} (size {tensor.shape[d]}): {_index(own)} only" for d, own in shown) or "all of its indices"
    )
    if telling and all(d == 0 for d, _ in telling):
        return f"{where}; are pages, or one of the parts that are stacked there (layers, K and V), missing"
    if any(2 * len(own) == tensor.shape[d] for d, own in telling):
        return f"{where}; is half of the heads, or one of K and V, missing"
    return f"{where}; are some of the heads, or is a part of each slot, missing"


def _known(stray: Stray, tensor: Tensor, first: int, writes: Sequence[ClaimedWrites]) -> Tensor:
    """Some described bytes of ``tensor``: the first and last of each chunk of a few slots."""
    found = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for write in writes:
        for source, _ in stray.described.get(write.region.name, ()):
            slots = write.slots[:64] if len(write.slots) else torch.arange(min(64, write.region.slots), device="cpu")
            page, place = slots // source.page_size, slots % source.page_size
            start = page * source.page_stride_bytes + place * source.slot_stride_bytes
            start = start + (source.address - stray.storage.start - first)
            byte = (torch.arange(source.chunks, device="cpu") * source.chunk_stride_bytes)[:, None] + torch.arange(
                source.chunk_bytes, device="cpu"
            )
            found.append((start[:, None] + byte.flatten()).flatten())
    places = torch.cat(found)
    return places[_inside(tensor, places)]


def _unnamed(write: ClaimedWrites, found: Sequence[tuple[KVSource, Tensor]]) -> Problem:
    """Slots changed without being named as written."""
    region, slots = write.region, torch.cat([slots for _, slots in found]).unique()
    page = region.sources[0].page_size
    pages = sorted({slot // page for slot in slots.tolist()})
    ends = {0, (region.slots - 1) // page} if region.null_slot is None else {region.null_slot // page}
    if len(pages) == 1 and pages[0] in ends and not bool((write.slots // page == pages[0]).any()):
        block = len(slots) > 1 or region.null_slot == pages[0] * page
        say = f"null_slot={pages[0] * page}, null_slots={page}" if block else f"null_slot={int(slots[0])}"
        thing = f"slots {_numbers(slots.tolist())}" if len(slots) > 1 else f"slot {int(slots[0])}"
        verb, it = ("were", "are they") if len(slots) > 1 else ("was", "is it")
        return Problem(
            "PoolAdapter",
            f"{thing} (page {pages[0]}) of region {region.name!r} {verb} written and no request writes there: {it} the "
            f"null {'block' if block else 'slot'}? Say Region({say})"
            + (
                ""
                if block or page == 1
                else f", or null_slots={page} from {pages[0] * page} on if all of the page is padding"
            ),
        )
    total = sum(len(s) for _, s in found)
    about = (
        f"the forward changed {numbered(total, 'byte')} in {_slots(region, found)}, in "
        f"{_sources([s for s, _ in found])}, which the view does not name as written"
    )
    shift = _shift(write, slots)
    if shift:
        text = f"{about}; the slots that it names lie {shift}: is prefix_lens, the table or the page size off by that?"
    else:
        text = f"{about}: do new_lens, write_slots and the table say what this forward does?"
    return Problem("PoolAdapter or BatchAdapter", text)


def _shift(write: ClaimedWrites, slots: Tensor) -> str | None:
    """Distance of the named but unchanged slots from ``slots``, if equal for all."""
    untouched = write.slots[~(write.changed & write.present).any(dim=1)]
    if not len(untouched) or len(untouched) != len(slots):
        return None
    distance = (untouched - slots).unique()
    return f"{int(distance[0]):+d} slots from there" if len(distance) == 1 else None


def unchanged(write: ClaimedWrites) -> Iterator[Problem]:
    """Slots should have changed in every source, and did not."""
    region, total = write.region, len(write.slots)
    if not total:
        return
    if not bool((write.changed & write.present).any()):
        if bool(write.present.any()):
            yield Problem(
                "BatchAdapter",
                f"nothing changed in the {numbered(total, 'slot')} of region {region.name!r} that the view names as "
                f"written ({_numbers(write.slots.tolist())}): is the view made for another forward, after this one, or "
                "with another table?",
            )
        return
    columns = zip(region.sources, write.present.T, write.changed.T, strict=True)
    same = [(source, present & ~changed, present) for source, present, changed in columns]
    same = [(source, still, present) for source, still, present in same if bool(still.any())]
    moved = [s for s, p, c in zip(region.sources, write.present.T, write.changed.T, strict=True) if bool((p & c).any())]
    for (count, of, _), items in groupby(same, key=lambda s: (int(s[1].sum()), int(s[2].sum()), s[1].tolist())):
        group = list(items)
        sources = [source for source, _, _ in group]
        if count == of:
            yield Problem(
                "PoolAdapter",
                f"nothing of {_kind(sources)} {_sources(sources)} of region {region.name!r} changed in "
                f"{numbered(of, 'written slot')}, while {_sources(moved)} did: does the source point at a copy, or at "
                "another layer?",
            )
        else:
            yield Problem(
                "PoolAdapter or BatchAdapter",
                f"{_kind(sources)} {_sources(sources)} of region {region.name!r} stayed the same in {count} of "
                f"{numbered(of, 'written slot')} ({_numbers(write.slots[group[0][1]].tolist())}): does the view name "
                "slots that this forward does not write?",
            )


def never_changed(region: Region, found: Sequence[tuple[KVSource, int]]) -> Iterator[Problem]:
    """Sources have not changed in any of so many written slots."""
    for count, items in groupby(found, key=lambda item: item[1]):
        sources = [source for source, _ in items]
        yield Problem(
            "PoolAdapter",
            f"nothing of {_kind(sources)} {_sources(sources)} of region {region.name!r} ever changed in "
            f"{numbered(count, 'written slot')} in which lower layers did: does the source point at a copy, or at "
            "another layer?",
        )


def _inside(tensor: Tensor, places: Tensor) -> Tensor:
    """Whether each byte at ``places`` (from the start of ``tensor``) belongs to an element of the tensor: bool
    ``[n]``."""
    coordinates = _coordinates(tensor, places)
    element = sum((c * s for c, s in zip(coordinates, tensor.stride(), strict=True)), torch.zeros_like(places))
    return (places >= 0) & (places // tensor.element_size() == element)


def _coordinates(tensor: Tensor, places: Tensor) -> list[Tensor]:
    """Index in each dimension of the element at each of ``places`` (bytes from the start of ``tensor``); exact where
    larger strides reach over smaller ones, as in any permuted slice of a dense tensor."""
    rest = places // tensor.element_size()
    found: list[Tensor] = [torch.zeros_like(places)] * tensor.dim()
    strides = tensor.stride()
    for d in sorted(range(tensor.dim()), key=lambda d: strides[d], reverse=True):
        stride = max(strides[d], 1)
        found[d] = (rest // stride).clamp(0, tensor.shape[d] - 1)
        rest = rest - found[d] * stride
    return found


def _slots(region: Region, found: Sequence[tuple[KVSource, Tensor]]) -> str:
    slots = torch.cat([slots for _, slots in found]).unique()
    page = region.sources[0].page_size
    pages = sorted({slot // page for slot in slots.tolist()})
    shown = f" ({'page' if len(pages) == 1 else 'pages'} {_numbers(pages)})" if page > 1 else ""
    return f"{'slot' if len(slots) == 1 else 'slots'} {_numbers(slots.tolist())}{shown} of region {region.name!r}"


def _sources(sources: Sequence[KVSource]) -> str:
    return listed([s.name for s in sources], SHOWN)


def _kind(sources: Sequence[KVSource]) -> str:
    return _verb(sources, "source", "sources")


def _verb(things: Sequence[object], one: str, many: str) -> str:
    return one if len(things) == 1 else many


def _index(numbers: Sequence[int]) -> str:
    return f"{'index' if len(numbers) == 1 else 'indices'} {_numbers(numbers)}"


def _numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs as ``3 to 7``."""
    found = runs(numbers)
    shown = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in found[:SHOWN]]
    return ", ".join(shown) + (" and more" if len(found) > SHOWN else "")
