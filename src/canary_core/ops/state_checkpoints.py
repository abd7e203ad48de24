"""Records of the states copied by a forward into checkpoint slots: see `StateCheckpoints`."""

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable, StateCheckpoints
from canary_core.errors import AttachError
from canary_core.ops.backends import Backend
from canary_core.ops.state import RegionState
from canary_core.records import Clock, Status


def record_checkpoints(backend: Backend, state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """After `record`: records the copies in the slots of ``table.checkpoints``. Their bytes are always fingerprinted,
    since a checkpoint may stay unwritten for long. They are judged like other writes, and, where ``copied``, as copies
    of the row's own state: reports BYTES for a difference. Slots beyond the region, and positions other than the row's
    new ones, are left out.

    Runs the ops of every forward once more, with another plan, made in a few small launches that allocate: not for a
    captured forward. Never waits for the device.
    """
    made = table.checkpoints
    if made is None or state.region.tokens_per_slot != 1:
        raise AttachError(f"region {state.region.name!r}: only regions of one token a slot keep what a forward stored")
    if not batch.tokens:
        return
    token, there, last = _places(state, batch, made)
    # The plan of the forward itself is read before it is replaced.
    own = _own_slots(state, token, there & last) if made.copied and state.sources else None
    _plan(state, batch, made, token, there)
    if state.sources:
        backend.fingerprint(state, batch, table)
    backend.record(state, batch, table)
    if own is not None:
        _compare(backend, state, own, torch.where(own >= 0, made.slots, -1))


def _places(state: RegionState, batch: BatchView, made: StateCheckpoints) -> tuple[Tensor, Tensor, Tensor]:
    """For each row: the index into ``token_ids`` of the checkpoint's token, whether the row has a checkpoint (if not,
    the index is 0), and whether the token is the row's last. All ``[rows]``."""
    slots, positions = made.slots, made.positions
    prefix, new = batch.prefix_lens.long().clamp(min=0), batch.new_lens.long().clamp(min=0)
    token = new.cumsum(0) - new + positions - prefix
    there = (positions >= prefix) & (positions < prefix + new)
    there &= token < batch.tokens
    there &= state.region.status_of(slots) == Status.OK
    # Rows that keep nothing add nothing to token 0, and claim slot 0 for nobody.
    return torch.where(there, token, 0), there, positions == prefix + new - 1


def _own_slots(state: RegionState, token: Tensor, chosen: Tensor) -> Tensor:
    """The slots written by the forward for the tokens ``token`` of the rows ``chosen``: int64 ``[rows]``, -1 for
    none."""
    word, slot = state.scratch.plan[token, 0], state.scratch.plan[token, 1]
    return torch.where(chosen & (word >> 32 == int(Status.OK) + 1), slot, -1)


def _compare(backend: Backend, state: RegionState, own: Tensor, copies: Tensor) -> None:
    """Slots ``copies`` must have the present bytes of slots ``own``; both int64 ``[rows]``, -1 for none."""
    backend.adopt(state, own)
    entry, copy, anything = state.entries(copies)
    known = state.fingerprints[own[entry].clamp(min=0)]
    state.fingerprints[copy] = torch.where(anything, known, state.fingerprints[copy])
    backend.verify(state, copies, 1)


def _plan(state: RegionState, batch: BatchView, made: StateCheckpoints, token: Tensor, there: Tensor) -> None:
    slots, positions = torch.where(there, made.slots, 0), made.positions
    row = torch.arange(len(slots), device=slots.device)
    word = (int(Status.OK) + 1 << 32) + row
    words = torch.stack((word, slots, positions, torch.full_like(row, -1)), 1)
    plan = state.scratch.plan[: batch.tokens].zero_()
    plan.index_add_(0, token, torch.cat((words, state.records[slots].view(torch.int64)), 1) * there[:, None])
    claim = state.scratch.claim(state.shared.clock[Clock.NEXT], token)
    state.scratch.claims.scatter_reduce_(0, slots, claim * there, "amax")
