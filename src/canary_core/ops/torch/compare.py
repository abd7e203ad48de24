"""The common part of read_check, scrub and verify: the bytes of slots, against the recorded fingerprints."""

import torch
from torch import Tensor

from canary_core.ops.mapping import Seen
from canary_core.ops.state import RegionState
from canary_core.ops.torch.stack import report_bytes, stacks
from canary_core.ops.torch.sums import compare_sums
from canary_core.records import PROBE, Clock, Counter, Kind, Phase, Row, State


def compare(state: RegionState, seen: Seen, phase: Phase, about: dict[Row, Tensor], probe: int = -1) -> None:
    """Compares bytes, except where a fingerprint is 0 (unknown). ``probe``: the source for which all bits of the first
    slot's fingerprint are inverted; a difference is a `PROBE` there, whatever the record says."""
    if state.sources.sums:
        compare_sums(state, seen, phase, about, probe)
        return
    written = seen.usable & (seen.state == State.WRITTEN)
    # Nearly all slots that a batch reads or a scrub lists were written, so a kernel looks at the record only where
    # bytes differ.
    asked = written if phase is Phase.EVENT else seen.usable
    for stack in stacks(state):
        compared = asked & stack.like.has_bytes(seen.slot)
        slot = seen.slot[compared]
        value, _ = stack.fold(state, slot)
        stored = state.fingerprints[slot[:, None], stack.columns].T
        probed = torch.zeros_like(stored, dtype=torch.bool)
        probed[:, :1] = (stack.columns == probe)[:, None] & compared[:1]
        stored = torch.where(probed, ~stored, stored)
        alike = (value == stored) & (stored != 0)
        differs = (value != stored) & (((stored != 0) & written[compared]) | probed)
        state.shared.counters[Counter.CHECKED_BYTES] += (alike | differs).sum() * stack.like.slot_bytes
        if bool(differs.any()):
            # Back to the shape of what was seen, for the report.
            mask = torch.zeros(len(stack.columns), len(compared), dtype=torch.bool, device=slot.device)
            found = torch.zeros_like(mask, dtype=torch.int64)
            mask[:, compared], found[:, compared] = differs, value
            step = state.shared.clock[Clock.NEXT] * 8 + phase
            fields = {Row.TOKEN: seen.token, **about, Row.FOUND_VALUE: found, Row.STEP: step}
            of_probe = torch.zeros_like(mask)
            of_probe[:, compared] = probed & differs
            report_bytes(state, seen, stack, {Kind.BYTES: mask & ~of_probe}, fields)
            if bool(of_probe.any()):
                wrong = torch.zeros_like(found)
                wrong[:, compared] = stored
                report_bytes(state, seen, stack, {PROBE: of_probe}, {**fields, Row.STORED_VALUE: wrong})
