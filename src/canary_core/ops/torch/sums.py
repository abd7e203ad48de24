"""Fingerprints shared by several sources: see `canary_core.ops.sums`."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from canary_core.ops.mapping import Seen
from canary_core.ops.state import RegionState
from canary_core.ops.sums import PER_GROUP, explained
from canary_core.ops.torch.ring import report
from canary_core.ops.torch.stack import stacks
from canary_core.records import PROBE, Clock, Counter, Descriptor, Kind, NullBytes, Phase, Row, State


class Summed(NamedTuple):
    """The bytes of ``n`` slots, of each source: ``values``, int64 ``[n, sources]``, its own fingerprints; ``there``,
    whether it has bytes, and ``odd``, whether a float has all exponent bits set, bool ``[n, sources]``; and of each
    group: ``numbers``, int64 ``[n, columns]``, and ``parts``, ``[n, groups]``, sources with bytes."""

    values: Tensor
    there: Tensor
    odd: Tensor
    numbers: Tensor
    parts: Tensor

    def of(self, number: int, first: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
        """By how much both numbers of a group differ from ``first``, ``[n]``, and from the second one in ``stored``,
        ``[n, columns]``."""
        column = PER_GROUP * number
        return self.numbers[:, column] - first, self.numbers[:, column + 1] - stored[:, column + 1]


def summed(state: RegionState, slots: Tensor) -> Summed:
    """The numbers of ``slots`` (int64 ``[n]``) by their present bytes."""
    sources = state.sources
    values = torch.zeros(len(slots), len(sources), dtype=torch.int64, device=slots.device)
    there, odd = torch.zeros_like(values, dtype=torch.bool), torch.zeros_like(values, dtype=torch.bool)
    for stack in stacks(state):
        present = stack.like.has_bytes(slots)
        value, bits = stack.fold(state, torch.where(present, slots, 0))
        values[:, stack.columns] = value.T
        there[:, stack.columns] = present[:, None]
        odd[:, stack.columns] = bits.T & present[:, None]
    raw = (values - sources.salts[: len(sources)]) * there
    weighted = raw * sources.sums.device_weights
    numbers, parts = [], []
    for group in sources.sums.members:
        numbers += [raw[:, group].sum(1), weighted[:, group].sum(1)]
        parts.append(there[:, group].sum(1))
    return Summed(values, there, odd, torch.stack(numbers, 1) + sources.zeros, torch.stack(parts, 1))


def compare_sums(state: RegionState, seen: Seen, phase: Phase, about: dict[Row, Tensor], probe: int) -> None:
    """As `compare.compare`. Reports the source that explains a slot's differences alone, else the group; a ``probe`` is
    of a group."""
    written = seen.usable & (seen.state == State.WRITTEN)
    asked = written if phase is Phase.EVENT else seen.usable
    step = state.shared.clock[Clock.NEXT] * 8 + phase
    found = summed(state, torch.where(asked, seen.slot, 0))
    stored = state.fingerprints[torch.where(asked, seen.slot, 0)]
    fields = {Row.TOKEN: seen.token, **about, Row.STEP: step}
    for number, group in enumerate(state.sources.sums.groups):
        probed = torch.zeros_like(asked)
        probed[:1] = probe == len(state.sources) + number
        first = torch.where(probed, ~stored[:, PER_GROUP * number], stored[:, PER_GROUP * number])
        by, weighted = found.of(number, first, stored)
        parts = found.parts[:, number] * asked
        alike = (by == 0) & (weighted == 0)
        known = (written & (first != 0)) | probed
        compared = (parts * (alike | known)).sum() * state.sources[group[0]].slot_bytes
        state.shared.counters[Counter.CHECKED_BYTES] += compared
        left = (parts > 0) & ~alike & known
        alone, _several = explained(by, weighted, state.sources.sums.device_weights[state.sources.sums.members[number]])
        for source, mask in zip(group, alone, strict=True):
            named = mask & left & ~probed & found.there[:, source]
            value = found.values[:, source]
            _report(state, seen, (Kind.BYTES, source), named, {**fields, **_values(value - by, value)})
            left &= ~named
        of_group = {**fields, **_values(first, found.numbers[:, PER_GROUP * number])}
        for kind, mask in ((Kind.BYTES, left & ~probed), (PROBE, left & probed)):
            _report(state, seen, (kind, len(state.sources) + number), mask, of_group)


def fingerprint_sums(state: RegionState, seen: Seen, other: Tensor, token: Tensor, about: dict[Row, Tensor]) -> None:
    """As `fingerprint.fingerprint`, of won places. A write is lost where it left all sources of a group as they were;
    ``other``: it should have changed them."""
    found = summed(state, seen.slot)
    fields = {**about, Row.TOKEN: token}
    counters = state.shared.counters
    sure = state.sources.descriptors[:, Descriptor.SURE] != 0
    for number, group in enumerate(state.sources.sums.groups):
        first = PER_GROUP * number
        old = state.fingerprints[seen.slot, first]
        there = found.parts[:, number] > 0
        by, weighted = found.of(number, old, state.fingerprints[seen.slot])
        same = there & (by == 0) & (weighted == 0) & sure[group[0]]
        lost = same & other
        values = _values(old, found.numbers[:, first])
        _report(state, seen, (Kind.LOST_WRITE, len(sure) + number), lost, {**fields, **values})
        for source in group:
            odd = there & ~lost & found.odd[:, source]
            value = found.values[:, source]
            values = _values(torch.zeros_like(value), value)
            _report(state, seen, (Kind.NON_FINITE, source), odd, {**fields, **values})
        counters[Counter.UNSURE] += (same & ~other).sum()
        counters[Counter.RECORDED_BYTES] += found.parts[:, number].sum() * state.sources[group[0]].slot_bytes
        _keep(state, seen.slot, number, found)


def look_at_null_sums(state: RegionState, seen: Seen, about: dict[Row, Tensor]) -> None:
    """As the look at a null slot in `fingerprint.fingerprint`."""
    found = summed(state, seen.slot)
    for number, group in enumerate(state.sources.sums.groups):
        first = PER_GROUP * number
        known, there = state.fingerprints[seen.slot, first], found.parts[:, number] > 0
        bad = found.odd[:, state.sources.sums.members[number]].any(1)
        for source in group:
            odd = bad & found.odd[:, source] & (known == NullBytes.FINITE)
            value = found.values[:, source]
            values = _values(torch.zeros_like(value), value)
            _report(state, seen, (Kind.NON_FINITE, source), odd, {**about, **values})
        unsure = bad & (known != NullBytes.FINITE) & (known != NullBytes.NOT_FINITE)
        state.shared.counters[Counter.UNSURE] += unsure.sum()
        held = torch.where(bad, int(NullBytes.NOT_FINITE), int(NullBytes.FINITE))
        for column in (first, first + 1):
            state.fingerprints[seen.slot, column] = torch.where(there, held, state.fingerprints[seen.slot, column])


def keep_sums(state: RegionState, slots: Tensor) -> None:
    """Fingerprints the present bytes of ``slots`` (int64 ``[n]``)."""
    found = summed(state, slots)
    for number in range(len(state.sources.sums.groups)):
        _keep(state, slots, number, found)


def _keep(state: RegionState, slots: Tensor, number: int, found: Summed) -> None:
    there = found.parts[:, number] > 0
    for column in (PER_GROUP * number, PER_GROUP * number + 1):
        state.fingerprints[slots, column] = torch.where(
            there, found.numbers[:, column], state.fingerprints[slots, column]
        )


def _report(
    state: RegionState, seen: Seen, finding: tuple[int, int], mask: Tensor, fields: Mapping[Row, Tensor]
) -> None:
    """Reports a ``finding``, a kind and the index of a source or group, for each of the slots ``seen`` where ``mask``,
    bool ``[n]``. ``fields``: one number for all, or ``[n]``."""
    if not bool(mask.any()):
        return
    kind, source = finding
    every: dict[Row, Tensor] = {**seen.fields(), **fields}
    chosen: dict[Row, Tensor | int] = {word: value[mask] if value.dim() else value for word, value in every.items()}
    report(state.shared, kind, seen.slot[mask], {**chosen, Row.REGION: state.index, Row.SOURCE: source})


def _values(stored: Tensor, found: Tensor) -> dict[Row, Tensor]:
    return {Row.STORED_VALUE: stored, Row.FOUND_VALUE: found}


def stored_and_found(state: RegionState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The fingerprints recorded of ``slots`` (int64 ``[n]``), 0 where unknown, and those of the present bytes, 0 where
    there are none: int64 ``[n, sources]``. Of sources that share fingerprints the recorded one is that of the bytes, or
    of the only source that can have changed, before its change. Where several have, it is that of another slot of
    ``slots`` whose bytes are the recorded ones; else it is not known which have, and each has another one than
    found."""
    if not state.sources.sums:
        stored = state.fingerprints[slots]
        values = torch.zeros_like(stored)
        for stack in stacks(state):
            there = stack.like.has_bytes(slots)
            value, _ = stack.fold(state, torch.where(there, slots, 0))
            values[:, stack.columns] = torch.where(there, value, 0).T
        return stored, values
    found, stored = summed(state, slots), state.fingerprints[slots]
    values = found.values * found.there
    out = values.clone()
    for number, group in enumerate(state.sources.sums.groups):
        first = stored[:, PER_GROUP * number]
        by, weighted = found.of(number, first, stored)
        alone, several = explained(by, weighted, state.sources.sums.device_weights[state.sources.sums.members[number]])
        # Exchanged slots have what was recorded of each other.
        columns = slice(PER_GROUP * number, PER_GROUP * (number + 1))
        owner = (stored[:, None, columns] == found.numbers[None, :, columns]).all(2)
        has_owner, owner = owner.any(1), owner.int().argmax(1)
        for source, mask in zip(group, alone, strict=True):
            unknown = torch.where(has_owner, values[owner, source], ~values[:, source])
            value = torch.where(several, unknown, values[:, source] - by * mask)
            out[:, source] = torch.where((first != 0) & found.there[:, source], value, 0)
    return out, values
