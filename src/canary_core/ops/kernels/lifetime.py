"""lifetime: the kernels of `canary_core.ops.reference.lifetime`. One launch an event; atomics show duplicates."""

import triton
import triton.language as tl
from torch import Tensor

from canary_core.ops.kernels.common import ALLOCATED, FREED, STATE_VALUES, UNWRITTEN, report, split_head
from canary_core.ops.kernels.launch import Launcher, arguments, jit, region_arguments
from canary_core.ops.state import RegionState
from canary_core.records import FREED_BY, POSITION, RECORD_WORDS, STEP_FREED, Clock, Kind, Phase

TILE = 256
WARPS = 4

WORDS = tl.constexpr(RECORD_WORDS)
WORD_POSITION = tl.constexpr(POSITION)
WORD_STEP_FREED = tl.constexpr(STEP_FREED)
WORD_FREED_BY = tl.constexpr(FREED_BY)
CLOCK_NEXT = tl.constexpr(int(Clock.NEXT))
KIND_DOUBLE_FREE = tl.constexpr(int(Kind.DOUBLE_FREE))
KIND_DOUBLE_ALLOC = tl.constexpr(int(Kind.DOUBLE_ALLOC))
KIND_NULL_SLOT = tl.constexpr(int(Kind.NULL_SLOT))
KIND_SLOT_RANGE = tl.constexpr(int(Kind.SLOT_RANGE))
PHASE_EVENT = tl.constexpr(int(Phase.EVENT))


def free(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """As `canary_core.ops.reference.lifetime.free`. One launch."""
    _launch(state, slots, writer, page_slots, freeing=True)


def alloc(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """As `canary_core.ops.reference.lifetime.alloc`. One launch."""
    _launch(state, slots, writer, page_slots, freeing=False)


def _launch(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int, freeing: bool) -> None:
    key = ("free" if freeing else "alloc", None)
    launcher = state.launches.by_op.get(key)
    if launcher is None:
        constants = {"FREEING": int(freeing), "TILE": TILE}
        launcher = Launcher(lifetime_kernel, state, (region_arguments(state),), constants, num_warps=WARPS)
        state.launches.by_op[key] = launcher
    count = slots.shape[0]
    each, writer = (writer, -1) if isinstance(writer, Tensor) else (None, writer)
    launcher((max(triton.cdiv(count, TILE), 1), 1), arguments(slots, count, each, writer, page_slots))


@jit("count", "writer", "page_slots")
def lifetime_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_slot,
    p_slots, count, p_writers, writer, page_slots,
    FREEING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: one program for each `TILE` slots, or pages of ``page_slots`` slots, of the event."""
    o_slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m = o_slot < count
    slot = tl.load(p_slots + o_slot, mask=m, other=0).to(tl.int64) * page_slots
    if p_writers is not None:
        writer = tl.load(p_writers + o_slot, mask=m, other=-1).to(tl.int32)
    null = m & ((slot < 0) | ((slot == null_slot) & (null_slot >= 0)))
    beyond = m & (slot >= slots)
    usable = m & (null == 0) & (beyond == 0)
    step = tl.load(p_clock + CLOCK_NEXT)
    p_word = p_words + slot * WORDS + WORD_POSITION
    if FREEING:
        old = tl.atomic_or(p_word, tl.full((TILE,), FREED, tl.int32), mask=usable)
        bad = usable & ((old & FREED) != 0)
        fresh = usable & (bad == 0)
        kind = tl.full((TILE,), KIND_DOUBLE_FREE, tl.int64)
        freed = tl.load(p_records + slot * 4 + 3, mask=usable, other=0)
        tl.store(p_words + slot * WORDS + WORD_STEP_FREED, step.to(tl.int32), mask=fresh)
        tl.store(p_words + slot * WORDS + WORD_FREED_BY, writer, mask=fresh)
        # Nothing but this program changes the other slots of a page that was in use until now.
        for i in range(1, page_slots):
            p_other = p_words + (slot + i) * WORDS
            m_other = fresh & (slot + i < slots)
            word = tl.load(p_other + WORD_POSITION, mask=m_other, other=0)
            tl.store(p_other + WORD_POSITION, word | FREED, mask=m_other)
            tl.store(p_other + WORD_STEP_FREED, step.to(tl.int32), mask=m_other)
            tl.store(p_other + WORD_FREED_BY, writer, mask=m_other)
    else:
        old = tl.atomic_xchg(p_word, tl.full((TILE,), ALLOCATED, tl.int32), mask=usable)
        bad = usable & ((old & FREED) == 0) & ((old & (STATE_VALUES - 1)) != UNWRITTEN)
        kind = tl.full((TILE,), KIND_DOUBLE_ALLOC, tl.int64)
        freed = tl.load(p_records + slot * 4 + 3, mask=usable, other=0)
        tl.store(p_records + slot * 4 + 3, tl.zeros_like(slot), mask=usable)
        for i in range(1, page_slots):
            m_other = usable & (slot + i < slots)
            word = tl.full((TILE,), ALLOCATED, tl.int32)
            tl.store(p_words + (slot + i) * WORDS + WORD_POSITION, word, mask=m_other)
            tl.store(p_records + (slot + i) * 4 + 3, tl.zeros_like(slot), mask=m_other)
    kind = tl.where(null, KIND_NULL_SLOT, tl.where(beyond, KIND_SLOT_RANGE, kind))
    if tl.sum((bad | null | beyond).to(tl.int32), 0) > 0:
        token, _ = split_head(tl.load(p_records + slot * 4, mask=usable, other=-1))
        hash = tl.load(p_records + slot * 4 + 1, mask=usable, other=-1)
        step_written, stored_writer = split_head(tl.load(p_records + slot * 4 + 2, mask=usable, other=-1))
        report(
            p_counters, p_ring, ring_rows, kind, bad | null | beyond, region, -1, slot, -1, -1, token,
            tl.where(usable, old.to(tl.int64), -1), hash, -1, writer, stored_writer, step_written,
            tl.where(usable, freed, -1), step * 8 + PHASE_EVENT,
        )  # fmt: skip
