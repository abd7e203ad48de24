"""verify: the bytes of given slots, against the recorded fingerprints."""

import torch
from torch import Tensor

from canary_core.ops.mapping import see
from canary_core.ops.state import RegionState
from canary_core.ops.torch.compare import compare
from canary_core.records import Phase, Row, Status


def verify(state: RegionState, slots: Tensor, page_slots: int = 1) -> None:
    """Between forwards: compares the bytes of ``slots`` (integer ``[n]``), or pages of ``page_slots`` slots. Reports
    BYTES. Numbers beyond the region are left out."""
    slot = (slots.long()[:, None] * page_slots + torch.arange(page_slots, device=slots.device)).flatten()
    outside = (slot < 0) | (slot >= state.region.slots)
    nobody = torch.full_like(slot, -1)
    seen = see(state, slot, torch.where(outside, int(Status.RANGE), int(Status.OK)))
    compare(state, seen, Phase.EVENT, {Row.POSITION: nobody, Row.WRITER: nobody})
