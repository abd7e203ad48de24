"""fingerprint and baseline: fingerprints of slots' bytes, judged where a forward has written."""

import torch

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.mapping import Seen, see
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan
from canary_core.ops.torch.record import won
from canary_core.ops.torch.stack import report_bytes, stacks
from canary_core.ops.torch.sums import fingerprint_sums, keep_sums, look_at_null_sums
from canary_core.records import FIRST_CONTENT, Clock, Counter, Descriptor, Kind, NullBytes, Phase, Row, Status


def fingerprint(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """After a forward, before `record` or beside it: fingerprints the bytes of every written slot.

    Reports LOST_WRITE where a sure source's bytes are unchanged although another token was written (or nothing was ever
    written before), NON_FINITE where a float has all exponent bits set. Bytes unchanged by a write of the same token
    are only counted, as `UNSURE`, and so are those of content in the place of a token, which may be the same under
    another number. No new fingerprint equals an unknown one.

    Looks at one null slot as well, the next one with each step: NON_FINITE where a source with only finite numbers so
    far has others now. Anything there at the first look is only counted, as `UNSURE`.
    """
    if not batch.tokens:
        return
    _look_at_null(state)
    writes = plan.planned_writes(state.scratch.plan, batch)
    writes = writes[won(state, writes)]
    seen = Seen.of(writes.record, writes.slot, writes.status)
    slot, token = writes.slot, batch.token_ids[writes.token].long()
    other = (seen.step_written == 0) | (seen.token != token)
    other &= torch.maximum(seen.token, token) < FIRST_CONTENT
    about = {
        Row.POSITION: writes.position,
        Row.TOKEN: token,
        Row.WRITER: batch.writers[writes.row].long(),
        Row.STEP: state.shared.clock[Clock.NEXT] * 8 + Phase.POST_FORWARD,
    }
    if state.sources.sums:
        fingerprint_sums(state, seen, other, token, about)
        return
    sure = state.sources.descriptors[:, Descriptor.SURE] != 0
    for stack in stacks(state):
        there = stack.like.has_bytes(slot)
        value, odd = stack.fold(state, torch.where(there, slot, 0))
        old = state.fingerprints[slot[:, None], stack.columns].T
        same = there & (value == old) & sure[stack.columns, None]
        lost = same & other
        findings = {Kind.LOST_WRITE: lost, Kind.NON_FINITE: there & ~lost & odd}
        report_bytes(state, seen, stack, findings, {**about, Row.FOUND_VALUE: value})
        state.fingerprints[slot[:, None], stack.columns] = torch.where(there, value, old).T
        state.shared.counters[Counter.UNSURE] += (same & ~other).sum()
        state.shared.counters[Counter.RECORDED_BYTES] += there.sum() * len(stack.columns) * stack.like.slot_bytes


def _look_at_null(state: RegionState) -> None:
    if not state.judged_nulls:
        return
    step = state.shared.clock[Clock.NEXT]
    slot = (state.region.null_range.start + step % state.judged_nulls).view(1)
    seen = see(state, slot, torch.full_like(slot, Status.OK))
    nobody = torch.full_like(slot, -1)
    about = {Row.POSITION: nobody, Row.TOKEN: nobody, Row.WRITER: nobody, Row.STEP: step * 8 + Phase.POST_FORWARD}
    if state.sources.sums:
        look_at_null_sums(state, seen, about)
        return
    for stack in stacks(state):
        there = stack.like.has_bytes(slot)
        value, odd = stack.fold(state, torch.where(there, slot, 0))
        known = state.fingerprints[slot[:, None], stack.columns].T
        bad = there & odd
        findings = {Kind.NON_FINITE: bad & (known == NullBytes.FINITE)}
        report_bytes(state, seen, stack, findings, {**about, Row.FOUND_VALUE: value})
        first = (known != NullBytes.FINITE) & (known != NullBytes.NOT_FINITE)
        state.shared.counters[Counter.UNSURE] += (bad & first).sum()
        held = torch.where(bad, int(NullBytes.NOT_FINITE), int(NullBytes.FINITE))
        state.fingerprints[slot[:, None], stack.columns] = torch.where(there, held, known).T


def baseline(state: RegionState) -> None:
    """At attach: fingerprints the present bytes of every slot, so that even a slot's first write can be seen to be
    lost."""
    every = torch.arange(state.region.slots, device=state.records.device)
    if state.sources.sums:
        keep_sums(state, every)
        return
    for stack in stacks(state):
        slot = every[stack.like.has_bytes(every)]
        value, _ = stack.fold(state, slot)
        state.fingerprints[slot[:, None], stack.columns] = value.T
