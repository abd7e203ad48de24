"""verify: the kernel of `canary_core.ops.torch.verify`. `fingerprint` explains how programs go over slots and
sources."""

import triton.language as tl
from torch import Tensor

from canary_core.ops.kernels.compare import compare
from canary_core.ops.kernels.fold import describe, tile_of
from canary_core.ops.kernels.launch import jit, launch_over
from canary_core.ops.kernels.tiles import VERIFY_TILES
from canary_core.ops.kernels.words import COUNT_CHECKED_BYTES, PHASE_EVENT
from canary_core.ops.state import RegionState


def verify(state: RegionState, slots: Tensor) -> None:
    """As `canary_core.ops.torch.verify.verify`. One launch a source group."""
    launch_over(state, "verify", verify_kernel, VERIFY_TILES, slots)


@jit("count")
def verify_kernel(region, sources, p_slots, count, BYTES: tl.constexpr):
    """Grid: any number of programs over tiles of `SLOTS` of the listed slots, by groups of sources."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    source = describe(sources, 0, BYTES)
    strip = describe(sources, len(BYTES.STRIPS) - 1, BYTES)
    checked = tl.zeros((), tl.int64)
    for i in range(tl.program_id(1), (count + SLOTS - 1) // SLOTS, tl.num_programs(1)):
        o_slot = tile_of(i, BYTES)
        slot = tl.load(p_slots + o_slot, mask=o_slot < count, other=-1).to(tl.int64)
        m = (slot >= 0) & (slot < region.slots)
        checked += compare(
            region, sources, source, strip, slot, m, tl.full(o_slot.shape, -1, tl.int64), None, 0, PHASE_EVENT, BYTES,
            False,
        )  # fmt: skip
    tl.atomic_add(region.p_counters + COUNT_CHECKED_BYTES, checked)
