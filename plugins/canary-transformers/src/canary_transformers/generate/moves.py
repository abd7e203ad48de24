"""Records of a group, where its bytes moved, came from elsewhere, or are zero."""

import torch
from torch import Tensor

from canary_core.canary import Canary
from canary_core.ops.state import RegionState
from canary_transformers.generate.groups import Group


def move(canary: Canary, group: Group, end: int, held: int) -> None:
    """The group now ends with position ``end`` and holds ``held`` tokens: records go where the bytes went."""
    every = _every_row(group, canary.states[group.name])
    first = end - held
    distance = first - group.first
    kept = min(group.held - distance, held)
    if distance > 0 and kept > 0:
        source = group.slots(range(distance, distance + kept), every)
        canary.slots.copy(group.name, source, group.slots(range(kept), every))
    if held < group.held:
        canary.slots.clear(group.name, group.slots(range(held, group.held), every))
    group.first, group.held = first, held


def carry(before: tuple[Group, RegionState], after: tuple[Group, RegionState], rows: Tensor) -> None:
    """A group takes the place of another one, whose rows ``rows`` are its own now."""
    (old, source), (group, target) = before, after
    kept = range(group.held)
    from_slots, to_slots = old.slots(kept, rows), group.slots(kept, _every_row(group, target))
    target.records[to_slots] = source.records[from_slots]
    target.fingerprints[to_slots] = source.fingerprints[from_slots]
    target.chains.copy_(source.chains)
    target.shared.clock.copy_(source.shared.clock)


def expect_zeros(group: Group, state: RegionState, indices: range) -> None:
    """The tensors were zero there before: a write that leaves them so is lost."""
    slots = group.slots(indices, _every_row(group, state))
    # The fingerprint of zero bytes is the salt alone.
    state.fingerprints[slots] = state.sources.salts[: state.fingerprints.shape[1]]


def excuse_pads(group: Group, state: RegionState, pads: Tensor) -> None:
    """``pads``: bool ``[rows, tokens]``, which of the last tokens have an embedding of zeros. That gives zero K and V:
    what a zeroed tensor held before. Such a write is not seen if lost."""
    if group.keeping.static_tokens is None:
        return
    stored = min(pads.shape[1], group.held)
    slots = group.slots(range(group.held - stored, group.held), _every_row(group, state))
    own = pads[:, pads.shape[1] - stored :].reshape(-1, 1)
    state.fingerprints[slots] = state.fingerprints[slots].masked_fill(own, 0)


def _every_row(group: Group, state: RegionState) -> Tensor:
    return torch.arange(group.rows, device=state.records.device)
