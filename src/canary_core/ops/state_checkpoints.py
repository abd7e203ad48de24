"""Records of the states that a forward copied into checkpoint slots: see `StateCheckpoints`."""

import torch

from canary_core.batch import BatchView, SlotTable
from canary_core.errors import AttachError
from canary_core.ops.backends import Backend
from canary_core.ops.state import RegionState
from canary_core.records import Clock, Status


def record_checkpoints(backend: Backend, state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """After `record`: records what the forward copied into the slots of ``table.checkpoints``. Their bytes are always
    fingerprinted, since nothing may write there for long. They are judged as other writes are; slots that are none, and
    positions that are no new ones of their row, are left out.

    It is the ops of every forward once more, with another plan, which is worked out in a few small launches that
    allocate: not for a forward that is captured. Never waits for the device.
    """
    if not batch.tokens:
        return
    _plan(state, batch, table)
    if state.sources:
        backend.fingerprint(state, batch, table)
    backend.record(state, batch, table)


def _plan(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    made = table.checkpoints
    if made is None or state.region.tokens_per_slot != 1:
        raise AttachError(f"region {state.region.name!r}: only regions of one token a slot keep what a forward stored")
    slots, positions = made.slots, made.positions
    prefix, new = batch.prefix_lens.long().clamp(min=0), batch.new_lens.long().clamp(min=0)
    token = new.cumsum(0) - new + positions - prefix
    there = (positions >= prefix) & (positions < prefix + new)
    there &= token < batch.tokens
    there &= state.region.status_of(slots) == Status.OK
    # Rows that keep nothing add nothing to token 0, and claim slot 0 for nobody.
    token, slots = torch.where(there, token, 0), torch.where(there, slots, 0)
    row = torch.arange(len(slots), device=slots.device)
    word = (int(Status.OK) + 1 << 32) + row
    plan = state.scratch.plan[: batch.tokens].zero_()
    plan.index_add_(0, token, torch.stack((word, slots, positions, torch.full_like(row, -1)), 1) * there[:, None])
    claim = (state.shared.clock[Clock.NEXT] << 32) + token + 1
    state.scratch.claims.scatter_reduce_(0, slots, claim * there, "amax")
