"""`FootprintAudit`: a forward's changes in the engine's memory, against the writes claimed by its adapter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.errors import AttachError, MisuseError
from canary_core.region import KVSource, Region, Role, Uncovered
from canary_core.watchers.audit import wording
from canary_core.watchers.audit.claims import Claims
from canary_core.watchers.audit.memory import EngineMemory, PoolTensors, Storage
from canary_core.watchers.audit.slot_bytes import SlotBytes
from canary_core.watchers.audit.snapshot import Snapshot
from canary_core.watchers.audit.wording import ClaimedWrites, Problem, Stray, Suspect

SURE_SLOTS = 16
"""Slots with a change in a lower layer, before a never-changing source is reported (see `FootprintAudit`)."""


CARRIED_SLOTS = 64
"""Slots carried over to new tensors at once."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Result of one audited forward.

    compared_bytes: bytes of the engine's memory. changed_bytes: bytes changed by the forward; claimed_bytes: of these,
    the claimed ones; unclaimed_bytes: the rest.
    written_slots: by region, number of slots named as written by the view. unchanged: by region/source, number of
    written slots without a change, where there are any.
    problems: a sentence each; none if all is well. suspects: for each problem, the part of the adapter to blame.
    """

    compared_bytes: int
    changed_bytes: int
    claimed_bytes: int
    unclaimed_bytes: int
    written_slots: dict[str, int] = field(default_factory=dict)
    unchanged: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


class FootprintAudit:
    """Audits ``regions`` against ``pool_tensors``: every tensor with KV of the engine, by the engine's own names, or a
    function that returns them, called again at each `begin`. Believes nothing of an adapter:

    - every byte that changes between `begin` and `end` must belong to a slot named as written by a view (`claim`), or
      named otherwise (`claim_slots`), or to a null slot, or to memory of ``uncovered`` with a tensor;
    - every slot named as written by a view must have changed in every source that has bytes for it;
    - no region may describe memory outside of the engine's.

    With ``strict`` every written slot must have changed, at once: the memory must hold random bytes before, so that no
    write repeats the old bytes. Without ``strict``, in a running engine, values may rightly stay equal: the same token
    in the same slot again, a first layer that depends on the token alone, a constant scale. Then a source is reported
    if, over all forwards so far, it has never changed in any written slot with a change in a source of a lower layer of
    its region, and there were at least `SURE_SLOTS` such slots; scales are not judged.

    A forward that makes other tensors, as for a growing cache, is audited where the region is rebound before `end`: the
    old bytes of each slot are compared with the bytes in the new tensors.

    Not for a hot path: waits for the device, and copies all of the engine's KV (`Snapshot`). The same forward gives the
    same sentences. Raises `AttachError` where ``pool_tensors`` is empty, or names anything but tensors.
    """

    def __init__(
        self,
        pool_tensors: PoolTensors,
        regions: Sequence[Region],
        *,
        uncovered: Sequence[Uncovered] = (),
        strict: bool = False,
    ) -> None:
        self._tensors = pool_tensors
        self._regions = tuple(regions)
        self._uncovered = tuple(uncovered)
        self._strict = strict
        self._snapshot: Snapshot | None = None
        self._claims: Claims | None = None
        self._before = self._regions
        self._early = Claims(regions)
        self._seen: dict[str, tuple[int, int]] = {}
        self._memory = self._look()

    @property
    def regions(self) -> tuple[Region, ...]:
        """The described ones."""
        return self._regions

    @property
    def device(self) -> torch.device:
        """Where the audited bytes are."""
        return self._regions[0].device

    @property
    def snapshot(self) -> Snapshot | None:
        """The copy of the last `begin`, None before the first one."""
        return self._snapshot

    def moved(self) -> dict[str, list[str]]:
        """Looks again at the engine's tensors: by region, the sources outside of all of them."""
        memory = self._look()
        found = {r.name: [s.name for s in _lost(memory, r)] for r in self._regions}
        return {name: sources for name, sources in found.items() if sources}

    def begin(self) -> None:
        """Before a forward, after all earlier work has ended: copies the engine's memory. Raises `NoRoomError` where
        memory is short. Never captured."""
        self._memory = self._look()
        if self._snapshot is None or self._snapshot.memory.places != self._memory.places:
            self._snapshot = None
            self._snapshot = Snapshot(self._memory)
        else:
            self._snapshot.memory = self._memory
        self._wait()
        self._snapshot.take()
        self._claims, self._early = self._early, Claims(self._regions)
        self._before = self._regions

    def claim(self, view: BatchView | None) -> None:
        """Between `begin` and `end`: claims the writes of ``view``; None claims nothing. Raises `AttachError` for a
        region outside of the audit, `MisuseError` outside of an audited forward."""
        claims = self._open("claim")
        if view is not None:
            claims.view(view)

    def claim_slots(self, region: str, slots: Tensor | None) -> None:
        """Claims ``slots`` (integer ``[n]`` of the region; None: all) as changed by something else than a forward,
        possibly from now on. Before `begin`: for the next audited forward. Raises `AttachError` as `claim`."""
        (self._early if self._claims is None else self._claims).slots(region, slots)

    def rebind(self, region: str, sources: Sequence[KVSource]) -> None:
        """The bytes of ``region`` are where ``sources`` say, from now on."""
        self._regions = tuple(replace(r, sources=tuple(sources)) if r.name == region else r for r in self._regions)

    def release(self) -> None:
        """Frees the copy; the next `begin` makes another."""
        self._snapshot = self._claims = None

    def abandon(self) -> None:
        """The forward has failed, and is not judged."""
        self._claims = None

    def end(self) -> Footprint:
        """After the forward: compares, and lists the problems. Waits for the device. Raises `MisuseError` without
        `begin`."""
        claims, self._claims = self._open("end"), None
        if self._snapshot is None:
            raise MisuseError("end was called without begin; call begin before the forward")
        self._wait()
        snapshot = self._follow(self._snapshot)
        writes = [self._writes(region, claims) for region in self._regions]
        claimed = sum(self._accept(part, slots) for part, slots in self._claimed(claims))
        self._accept_uncovered()
        strays = []
        for index in range(len(self._memory.storages)):
            count, places = snapshot.differing(index)
            if count:
                strays.append(Stray(self._memory.storages[index], count, places, self._described(index, places)))
        unclaimed = sum(stray.count for stray in strays)
        found = list(self._problems(claims, writes, strays))
        return Footprint(
            compared_bytes=self._memory.size_bytes,
            changed_bytes=claimed + unclaimed,
            claimed_bytes=claimed,
            unclaimed_bytes=unclaimed,
            written_slots={w.region.name: len(w.slots) for w in writes if len(w.slots)},
            unchanged=_unchanged(writes),
            problems=tuple(problem.text for problem in found),
            suspects=tuple(problem.suspect for problem in found),
        )

    def _follow(self, old: Snapshot) -> Snapshot:
        """The copy to compare with. A forward may make other tensors, as for a growing cache: then the old bytes of
        each slot are laid where the slot is now, and bytes new to a slot are inverted, so that they count as
        changed."""
        memory, before = self._look(), self._memory
        if memory.places == before.places:
            return old
        held = {(r.name, s.name): (before.holding(s, r.slots), s) for r in self._before for s in r.sources}
        new = Snapshot(memory)
        new.take()
        for storage, copy in zip(memory.storages, new.copies, strict=True):
            for _, tensor in storage.tensors:
                inside = _within(tensor, storage, copy)
                inside.copy_(inside.bitwise_not())
        self._memory, self._snapshot = memory, new
        for region in self._regions:
            slots = torch.arange(region.slots, device=region.device)
            for source in region.sources:
                part = self._part(region, source)
                index, was = held.get((region.name, source.name), (None, source))
                if part is None or index is None:
                    continue
                origin = SlotBytes(was, before.storages[index])
                both = slots[source.has_bytes(slots) & was.has_bytes(slots)]
                for piece in both.split(CARRIED_SLOTS):
                    (_, source_places), (_, places) = next(origin.pieces(piece)), next(part.pieces(piece))
                    bytes_before = origin.units(old.copies[index])[source_places.to(old.device)].view(torch.uint8)
                    copy = self._copy(part)
                    part.units(copy)[places.to(copy.device)] = bytes_before.to(copy.device).view(part.unit)
        return new

    def _problems(self, claims: Claims, writes: Sequence[ClaimedWrites], strays: Sequence[Stray]) -> Iterator[Problem]:
        for region in self._regions:
            lost = _lost(self._memory, region)
            if lost:
                yield wording.elsewhere(region, lost)
            if region.name in claims.outside:
                yield wording.out_of_range(region, claims.outside[region.name].tolist())
        yield from wording.unclaimed(strays, writes, claims.any_written)
        for write in writes:
            if self._strict:
                yield from wording.unchanged(write)
            else:
                yield from wording.never_changed(write.region, self._never_changed(write))

    def _never_changed(self, write: ClaimedWrites) -> list[tuple[KVSource, int]]:
        """Sources shown by this forward never to change, each with the number of slots as evidence."""
        found = []
        for j, source in enumerate(write.region.sources):
            lower = [i for i, other in enumerate(write.region.sources) if other.layer < source.layer]
            if source.role is Role.SCALE or not lower or not len(write.slots):
                continue
            judged = write.present[:, j] & write.changed[:, lower].any(dim=1)
            name = f"{write.region.name}/{source.name}"
            before = self._seen.get(name, (0, 0))
            judged_slots = before[0] + int(judged.sum())
            changed_slots = before[1] + int((judged & write.changed[:, j]).sum())
            self._seen[name] = (judged_slots, changed_slots)
            if not changed_slots and judged_slots >= SURE_SLOTS > before[0]:
                found.append((source, judged_slots))
        return found

    def _writes(self, region: Region, claims: Claims) -> ClaimedWrites:
        slots = claims.written(region)
        changed = torch.zeros(len(slots), len(region.sources), dtype=torch.bool, device=slots.device)
        present = torch.zeros_like(changed)
        for j, part in enumerate(self._part(region, source) for source in region.sources):
            if part is None:
                continue
            index = torch.searchsorted(slots, slots[part.source.has_bytes(slots)])
            present[index, j] = True
            done = 0
            for piece, places in part.pieces(slots):
                now, before = self._both(part, places)
                changed[index[done : done + len(piece)], j] = (now != before).any(dim=1)
                done += len(piece)
        return ClaimedWrites(region, slots.cpu(), changed.cpu(), present.cpu())

    def _claimed(self, claims: Claims) -> Iterator[tuple[SlotBytes, Tensor]]:
        for region in self._regions:
            slots = torch.cat((claims.written(region), claims.allowed(region))).unique()
            for source in region.sources:
                part = self._part(region, source)
                if part is not None and len(slots):
                    yield part, slots

    def _accept(self, part: SlotBytes, slots: Tensor) -> int:
        """Puts the present bytes of ``slots`` into the copy, so that they no longer differ; returns how many did."""
        count = 0
        copy = self._copy(part)
        for _, places in part.pieces(slots):
            now, before = self._both(part, places)
            count += int((now.view(torch.uint8) != before.view(torch.uint8)).sum())
            part.units(copy)[places.to(copy.device)] = now.to(copy.device)
        return count

    def _accept_uncovered(self) -> None:
        """As `_accept`, for memory left out by the adapter."""
        for item in self._uncovered:
            tensor = item.tensor
            for storage, copy in self._copies():
                first = 0 if tensor is None else tensor.data_ptr() - storage.start
                if tensor is None or tensor.device != storage.data.device or not 0 <= first < storage.data.numel():
                    continue
                _within(tensor, storage, copy).copy_(_within(tensor, storage, storage.data))

    def _described(self, index: int, places: Tensor) -> dict[str, list[tuple[KVSource, Tensor]]]:
        """By region, its sources in storage ``index`` and the slots of ``places`` (offsets)."""
        found: dict[str, list[tuple[KVSource, Tensor]]] = {}
        for region in self._regions:
            for source in region.sources:
                if self._memory.holding(source, region.slots) == index:
                    part = SlotBytes(source, self._memory.storages[index])
                    found.setdefault(region.name, []).append((source, part.slots_at(places, region.slots)))
        return found

    def _both(self, part: SlotBytes, places: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes at ``places`` now and before, on the pool's device."""
        copy = self._copy(part)
        now = part.units(part.storage.data)[places]
        return now, part.units(copy)[places.to(copy.device)].to(now.device)

    def _copy(self, part: SlotBytes) -> Tensor:
        return next(copy for storage, copy in self._copies() if storage is part.storage)

    def _copies(self) -> Iterator[tuple[Storage, Tensor]]:
        if self._snapshot is not None:
            yield from zip(self._memory.storages, self._snapshot.copies, strict=True)

    def _part(self, region: Region, source: KVSource) -> SlotBytes | None:
        index = self._memory.holding(source, region.slots)
        return None if index is None else SlotBytes(source, self._memory.storages[index])

    def _look(self) -> EngineMemory:
        tensors = self._tensors() if callable(self._tensors) else self._tensors
        memory = EngineMemory(tensors)
        if not memory.storages:
            raise AttachError(
                f"pool_tensors names no tensor with memory, got {sorted(tensors)}; name every tensor in which the "
                "engine keeps KV (tensors_of(pool) finds them)"
            )
        return memory

    def _open(self, what: str) -> Claims:
        if self._claims is None:
            raise MisuseError(f"{what} was called outside of an audited forward; call begin first")
        return self._claims

    def _wait(self) -> None:
        for device in {s.data.device for s in self._memory.storages if s.data.device.type == "cuda"}:
            torch.cuda.synchronize(device)


def _within(tensor: Tensor, storage: Storage, data: Tensor) -> Tensor:
    """The bytes of ``tensor``, a part of ``storage``, in ``data``: the storage's bytes or a copy."""
    size = tensor.element_size()
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return data.as_strided((*tensor.shape, size), strides, tensor.data_ptr() - storage.start)


def _lost(memory: EngineMemory, region: Region) -> list[KVSource]:
    """Sources of ``region`` outside of the engine's memory."""
    return [s for s in region.sources if memory.holding(s, region.slots) is None]


def _unchanged(writes: Sequence[ClaimedWrites]) -> dict[str, int]:
    found = {}
    for write in writes:
        for j, source in enumerate(write.region.sources):
            count = int((write.present[:, j] & ~write.changed[:, j]).sum())
            if count:
                found[f"{write.region.name}/{source.name}"] = count
    return found
