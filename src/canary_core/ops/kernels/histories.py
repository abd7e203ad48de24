"""note: the kernel of `canary_core.ops.torch.histories`, and the device functions by which other kernels note
events."""

import triton
import triton.language as tl
from torch import Tensor

from canary_core.ops.kernels.launch import Launcher, arguments, jit, region_arguments
from canary_core.ops.kernels.words import CLOCK_NEXT, EVENT_SHARE
from canary_core.ops.launches import Arguments
from canary_core.ops.state import RegionState
from canary_core.records import HISTORY, HISTORY_EVENT_BITS, HISTORY_NUMBER_BITS

TILE = 256
WARPS = 4

ENTRIES = tl.constexpr(HISTORY)
EVENT_BITS = tl.constexpr(HISTORY_EVENT_BITS)
STEP_BIT = tl.constexpr(HISTORY_EVENT_BITS + HISTORY_NUMBER_BITS)
SAME_BITS = tl.constexpr((1 << HISTORY_EVENT_BITS + HISTORY_NUMBER_BITS) - 1)
"""All of an entry but the step."""
EVENT_VALUES = tl.constexpr((1 << HISTORY_EVENT_BITS) - 1)
NUMBER_VALUES = tl.constexpr((1 << HISTORY_NUMBER_BITS) - 1)


def history_arguments(state: RegionState) -> Arguments:
    """``p_histories``; None where the region has none."""
    return arguments(state.histories)


def note(state: RegionState, slots: Tensor, event: int, who: int | Tensor = -1) -> None:
    """As `canary_core.ops.torch.histories.note`. One launch; may be captured."""
    if state.histories is None:
        return
    launcher = state.launches.by_op.get("note")
    if launcher is None:
        fixed = (region_arguments(state), history_arguments(state))
        launcher = Launcher(note_kernel, state, fixed, {"TILE": TILE}, num_warps=WARPS)
        state.launches.by_op["note"] = launcher
    count = slots.shape[0]
    each, who = (who, -1) if isinstance(who, Tensor) else (None, who)
    launcher((max(triton.cdiv(count, TILE), 1), 1), arguments(slots, count, event, each, who))


@jit("count", "event", "who")
def note_kernel(
    region, p_histories, p_slots, count, event, p_who, who,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid: one program for each `TILE` slots."""
    o_slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m = o_slot < count
    slot = tl.load(p_slots + o_slot, mask=m, other=0).to(tl.int64)
    number = tl.zeros_like(slot) + who
    if p_who is not None:
        number = tl.load(p_who + o_slot, mask=m, other=-1).to(tl.int64)
    usable = m & (slot >= 0) & (slot < region.slots) & ((slot < region.null_first) | (slot >= region.null_end))
    new = entry(event, number, tl.load(region.p_clock + CLOCK_NEXT))
    first, second, third = newest_once(p_histories, slot, new, usable)
    push(p_histories, slot, new, first, second, third, usable)


@triton.jit
def entry(event, who, step):
    """An entry of int64 ``who`` and ``step``."""
    number = (who & NUMBER_VALUES) << EVENT_BITS
    return ((step & NUMBER_VALUES) << STEP_BIT) | number | event


@triton.jit
def replaces(new, old):
    """Where ``new`` takes the place of the newest entry, ``old``."""
    other = (new ^ old) & SAME_BITS
    return (other == 0) | (((other & EVENT_VALUES) == 0) & ((new & EVENT_VALUES) == EVENT_SHARE))


@triton.jit
def newest(p_histories, slot, m):
    """The older entries of each slot, kept beneath a new one. Apart from `push`, so that a kernel can load them with
    its other loads, for one wait."""
    p_entry = p_histories + slot * ENTRIES
    first = tl.load(p_entry, mask=m, other=0)
    second = tl.load(p_entry + 1, mask=m, other=0)
    third = tl.load(p_entry + 2, mask=m, other=0)
    return first, second, third


@triton.jit
def newest_once(p_histories, slot, new, m):
    """As `newest`, for a slot that may be there several times, with the same ``new``. All but the first find ``new`` as
    the newest entry: an atomic shows the first."""
    p_entry = p_histories + slot * ENTRIES
    second = tl.load(p_entry + 1, mask=m, other=0)
    third = tl.load(p_entry + 2, mask=m, other=0)
    first = tl.atomic_xchg(p_entry, new, mask=m)
    return first, second, third


@triton.jit
def push(p_histories, slot, new, first, second, third, m):
    """Puts ``new`` before the entries returned by `newest`, for each slot where ``m``; no slot may be there twice,
    except after `newest_once`."""
    p_entry = p_histories + slot * ENTRIES
    m_move = m & (replaces(new, first) == 0)
    tl.store(p_entry, new, mask=m)
    tl.store(p_entry + 1, first, mask=m_move)
    tl.store(p_entry + 2, second, mask=m_move)
    tl.store(p_entry + 3, third, mask=m_move)
