"""note_store and compare_stores: bytes stored by a layer must be the same at the end of the forward."""

from collections.abc import Sequence

import torch

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan
from canary_core.ops.torch.record import won
from canary_core.ops.torch.ring import report
from canary_core.ops.torch.stack import Stack, stacks
from canary_core.records import STATES, Clock, Kind, Phase, Row, State


def note_store(state: RegionState, batch: BatchView, columns: Sequence[int]) -> None:
    """Within a forward, after `check` has planned the writes: fingerprints, into ``state.stores``, the just stored
    bytes of the new slots in the sources ``columns`` (indices). A source that shares a launch with an unlisted one is
    left out."""
    listed = [column for group in state.sources.groups_of(columns) for row in group.columns.tolist() for column in row]
    if not listed or not batch.tokens:
        return
    writes = plan.planned_writes(state.scratch.plan, batch)
    slot = writes.slot[won(state, writes)]
    for stack in stacks(state):
        chosen = [i for i, column in enumerate(stack.indices) if column in listed]
        if not chosen:
            continue
        part = Stack(stack.like, stack.columns[chosen], stack.starts[chosen], tuple(stack.indices[i] for i in chosen))
        there = stack.like.has_bytes(slot)
        value, _ = part.fold(state, torch.where(there, slot, 0))
        old = state.stores[slot[:, None], part.columns].T
        state.stores[slot[:, None], part.columns] = torch.where(there, value, old).T


def compare_stores(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """After `fingerprint` and before `record`: reports BYTES where a source of a new slot has another fingerprint than
    at the store, and empties the notes of these slots."""
    if not batch.tokens:
        return
    writes = plan.planned_writes(state.scratch.plan, batch)
    writes = writes[won(state, writes)]
    noted, now = state.stores[writes.slot], state.fingerprints[writes.slot]
    state.stores[writes.slot] = 0
    wrong = (noted != 0) & (noted != now)
    if not bool(wrong.any()):
        return
    token, writer = batch.token_ids[writes.token].long(), batch.writers[writes.row].long()
    step = state.shared.clock[Clock.NEXT]
    # What is stored there is this forward's.
    fields = {
        Row.POSITION: writes.position,
        Row.TOKEN: token,
        Row.WRITER: writer,
        Row.STORED_POSITION: writes.position * STATES + State.WRITTEN,
        Row.STORED_TOKEN: token,
        Row.STORED_WRITER: writer,
    }
    for column in wrong.any(0).nonzero()[:, 0].tolist():
        mask = wrong[:, column]
        chosen: dict[Row, torch.Tensor | int] = {word: value[mask] for word, value in fields.items()}
        values = {Row.STORED_VALUE: noted[mask, column], Row.FOUND_VALUE: now[mask, column]}
        about: dict[Row, torch.Tensor | int] = {
            Row.REGION: state.index,
            Row.SOURCE: column,
            Row.STEP_WRITTEN: step,
            Row.STEP: step * 8 + Phase.POST_FORWARD,
        }
        report(state.shared, Kind.BYTES, writes.slot[mask], {**chosen, **values, **about})
