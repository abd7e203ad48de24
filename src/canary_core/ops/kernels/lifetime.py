"""lifetime: the kernel of `canary_core.ops.torch.lifetime`. One launch an event; atomics show duplicates.

All events are one kernel, with the event as a number: a start compiles two kernels (one writer for all, or one a slot),
not ten.
"""

import triton
import triton.language as tl
from torch import Tensor

from canary_core.ops.kernels.common import report, split_head
from canary_core.ops.kernels.histories import entry, history_arguments, newest, newest_once, push
from canary_core.ops.kernels.launch import Launcher, arguments, jit, region_arguments
from canary_core.ops.kernels.words import (
    ALLOCATED,
    CLOCK_NEXT,
    CONTENT_BITS,
    EVENT_ALLOC,
    EVENT_EVICT,
    EVENT_PARK,
    EVENT_SHARE,
    FREED,
    KIND_DOUBLE_ALLOC,
    KIND_DOUBLE_FREE,
    KIND_EVICTED_IN_USE,
    KIND_FREED,
    KIND_NULL_SLOT,
    KIND_SLOT_RANGE,
    NOT_PARKED,
    PARKED,
    PHASE_EVENT,
    RECORD,
    RECORD_POSITION,
    WRITTEN,
)
from canary_core.ops.state import RegionState
from canary_core.records import Happened

TILE = 256
WARPS = 4


def alloc(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """As `canary_core.ops.torch.lifetime.alloc`. One launch."""
    _launch(Happened.ALLOC, state, slots, writer, page_slots)


def park(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """As `canary_core.ops.torch.lifetime.park`. One launch."""
    _launch(Happened.PARK, state, slots, writer, page_slots)


def share(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """As `canary_core.ops.torch.lifetime.share`. One launch."""
    _launch(Happened.SHARE, state, slots, writer, page_slots)


def evict(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """As `canary_core.ops.torch.lifetime.evict`. One launch."""
    _launch(Happened.EVICT, state, slots, writer, page_slots)


def free(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """As `canary_core.ops.torch.lifetime.free`. One launch."""
    _launch(Happened.FREE, state, slots, writer, page_slots)


def _launch(event: Happened, state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int) -> None:
    launcher = state.launches.by_op.get("lifetime")
    if launcher is None:
        fixed = (region_arguments(state), history_arguments(state))
        launcher = Launcher(lifetime_kernel, state, fixed, {"TILE": TILE}, num_warps=WARPS)
        state.launches.by_op["lifetime"] = launcher
    count = slots.shape[0]
    each, writer = (writer, -1) if isinstance(writer, Tensor) else (None, writer)
    launcher((max(triton.cdiv(count, TILE), 1), 1), arguments(slots, count, each, writer, page_slots, int(event)))


@jit("count", "writer", "page_slots", "event")
def lifetime_kernel(
    region, p_histories, p_slots, count, p_writers, writer, page_slots, event,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid: one program for each `TILE` slots, or pages of ``page_slots`` slots, of the event.

    An atomic changes the word of each page's first slot and returns the old word; a second one takes the change back
    where the event does not apply. ``moved``: pages to which the event applies, one of several with the same slot; the
    rest of such a page belongs to the one program. ``noted``: pages whose histories are written, also one of several:
    the event happened, whether it applies or not.
    """
    o_slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m = o_slot < count
    slot = tl.load(p_slots + o_slot, mask=m, other=0).to(tl.int64) * page_slots
    if p_writers is not None:
        writer = tl.load(p_writers + o_slot, mask=m, other=-1).to(tl.int32)
    null = m & ((slot < 0) | ((slot >= region.null_first) & (slot < region.null_end)))
    beyond = m & (slot >= region.slots)
    usable = m & (null == 0) & (beyond == 0)
    step = tl.load(region.p_clock + CLOCK_NEXT)
    if p_histories is not None:
        new = entry(event, tl.zeros_like(slot) + writer, step)
        first, second, third = newest_once(p_histories, slot, new, usable)
    p_word = region.p_words + slot * RECORD + RECORD_POSITION
    freed_bit = tl.full((TILE,), FREED, tl.int32)
    parked_bit = tl.full((TILE,), PARKED, tl.int32)
    not_parked = tl.full((TILE,), NOT_PARKED, tl.int32)
    kind = tl.full((TILE,), KIND_DOUBLE_FREE, tl.int64)
    # When the slot was freed or parked, and by whom; 0 where it is neither.
    released = tl.zeros_like(slot) + ((step & 0xFFFFFFFF) | (writer.to(tl.int64) << 32))
    if event == EVENT_ALLOC:
        old = tl.atomic_xchg(p_word, tl.full((TILE,), ALLOCATED, tl.int32), mask=usable)
        moved = usable
        bad = usable & ((old & FREED) == 0) & (((old & PARKED) != 0) | held(old))
        kind = tl.full((TILE,), KIND_DOUBLE_ALLOC, tl.int64)
        released = tl.zeros_like(slot)
    elif event == EVENT_PARK:
        old = tl.atomic_or(p_word, parked_bit, mask=usable)
        tl.atomic_and(p_word, not_parked, mask=usable & ((old & FREED) != 0) & ((old & PARKED) == 0))
        bad = usable & ((old & (FREED | PARKED)) != 0)
        moved = usable & (bad == 0)
    elif event == EVENT_SHARE:
        old = tl.atomic_and(p_word, not_parked, mask=usable)
        tl.atomic_or(p_word, parked_bit, mask=usable & ((old & FREED) != 0) & ((old & PARKED) != 0))
        bad = usable & ((old & FREED) != 0)
        moved = usable & (bad == 0)
        kind = tl.full((TILE,), KIND_FREED, tl.int64)
        released = tl.zeros_like(slot)
    else:
        old = tl.atomic_or(p_word, freed_bit, mask=usable)
        moved = usable & ((old & FREED) == 0)
        tl.atomic_and(p_word, not_parked, mask=moved & ((old & PARKED) != 0))
        if event == EVENT_EVICT:
            in_use = moved & ((old & PARKED) == 0) & held(old)
            bad = in_use | (usable & (moved == 0))
            kind = tl.where(in_use, KIND_EVICTED_IN_USE, KIND_DOUBLE_FREE).to(tl.int64)
        else:
            bad = usable & ((old & (FREED | PARKED)) != 0)
    if p_histories is not None:
        push(p_histories, slot, new, first, second, third, usable)
        noted = usable & (first != new)
    freed = tl.load(region.p_records + slot * 4 + 3, mask=usable, other=0)
    tl.store(region.p_records + slot * 4 + 3, released, mask=moved)
    for i in range(1, page_slots):
        p_other = region.p_words + (slot + i) * RECORD + RECORD_POSITION
        m_other = moved & (slot + i < region.slots)
        if p_histories is not None:
            m_noted = noted & (slot + i < region.slots)
            first, second, third = newest(p_histories, slot + i, m_noted)
        if event == EVENT_ALLOC:
            word = tl.full((TILE,), ALLOCATED, tl.int32)
        else:
            word = tl.load(p_other, mask=m_other, other=0)
            if event == EVENT_PARK:
                word = word | PARKED
            else:
                word = word & NOT_PARKED
                if event != EVENT_SHARE:
                    word = word | FREED
        tl.store(p_other, word, mask=m_other)
        tl.store(region.p_records + (slot + i) * 4 + 3, released, mask=m_other)
        if p_histories is not None:
            push(p_histories, slot + i, new, first, second, third, m_noted)
    kind = tl.where(null, KIND_NULL_SLOT, tl.where(beyond, KIND_SLOT_RANGE, kind))
    if tl.sum((bad | null | beyond).to(tl.int32), 0) > 0:
        token, _ = split_head(tl.load(region.p_records + slot * 4, mask=usable, other=-1))
        hash = tl.load(region.p_records + slot * 4 + 1, mask=usable, other=-1)
        step_written, stored_writer = split_head(tl.load(region.p_records + slot * 4 + 2, mask=usable, other=-1))
        report(
            region, kind, bad | null | beyond, -1, slot, -1, -1, token, tl.where(usable, old.to(tl.int64), -1), hash,
            -1, writer, stored_writer, step_written, tl.where(usable, freed, -1), step * 8 + PHASE_EVENT,
        )  # fmt: skip


@triton.jit
def held(word):
    """Whether slots hold content of a request, by their position words."""
    return ((word & CONTENT_BITS) == WRITTEN) | ((word & CONTENT_BITS) == ALLOCATED)
