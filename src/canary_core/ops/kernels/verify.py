"""verify: the kernel of `canary_core.ops.torch.verify`. `fingerprint` explains how programs go over slots and
sources."""

import triton.language as tl
from torch import Tensor

from canary_core.ops.kernels.compare import compare
from canary_core.ops.kernels.fold import describe, tile_of
from canary_core.ops.kernels.launch import arguments, group_launches, jit, launch_groups
from canary_core.ops.kernels.tiles import VERIFY_TILES
from canary_core.ops.kernels.words import COUNT_CHECKED_BYTES, PHASE_EVENT
from canary_core.ops.state import RegionState


def verify(state: RegionState, slots: Tensor, page_slots: int = 1) -> None:
    """As `canary_core.ops.torch.verify.verify`. One launch a source group."""
    count = slots.shape[0] * page_slots
    launches = group_launches(state, "verify", verify_kernel, VERIFY_TILES)
    launch_groups(launches, count, arguments(slots, count, page_slots))


@jit("count", "page_slots")
def verify_kernel(region, sources, p_slots, count, page_slots, BYTES: tl.constexpr):
    """Grid: any number of programs over tiles of `SLOTS` of the ``count`` slots in the listed pages, by groups of
    sources."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    source = describe(sources, 0, BYTES)
    strip = describe(sources, len(BYTES.STRIPS) - 1, BYTES)
    checked = tl.zeros((), tl.int64)
    for i in range(tl.program_id(1), (count + SLOTS - 1) // SLOTS, tl.num_programs(1)):
        o_slot = tile_of(i, BYTES)
        page = tl.load(p_slots + o_slot // page_slots, mask=o_slot < count, other=-1).to(tl.int64)
        slot = page * page_slots + o_slot % page_slots
        m = (slot >= 0) & (slot < region.slots)
        checked += compare(
            region, sources, source, strip, slot, m, tl.full(o_slot.shape, -1, tl.int64), None, 0, PHASE_EVENT, BYTES,
            False,
        )  # fmt: skip
    tl.atomic_add(region.p_counters + COUNT_CHECKED_BYTES, checked)
