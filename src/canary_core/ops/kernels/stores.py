"""note_store and compare_stores: the kernels of `canary_core.ops.torch.stores`."""

from collections.abc import Sequence

import triton
import triton.language as tl

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.kernels.common import claim_of, report
from canary_core.ops.kernels.fold import keep, spread
from canary_core.ops.kernels.launch import Launcher, arguments, group_launches, jit, programs, region_arguments
from canary_core.ops.kernels.tiles import SCRUB_TILES
from canary_core.ops.kernels.words import CLOCK_NEXT, KIND_BYTES, PHASE_POST, PLAN, STATE_VALUES, STATUS_OK, WRITTEN
from canary_core.ops.state import RegionState

TILE = 64
"""New tokens whose noted fingerprints are compared at a time by a program."""
WARPS = 4
PROGRAMS_PER_PROCESSOR = 2


def note_store(state: RegionState, batch: BatchView, columns: Sequence[int]) -> None:
    """As `canary_core.ops.torch.stores.note_store`. One launch for each source group with one of ``columns``. Never
    captured: the first launch of a set of columns waits for the device."""
    if not batch.tokens:
        return
    op = f"note_store {','.join(map(str, columns))}"
    groups = () if (op, None) in state.launches.by_group else state.sources.groups_of(columns)
    given = arguments(state.stores, batch.tokens)
    for launch in group_launches(state, op, note_store_kernel, SCRUB_TILES, groups=groups):
        needed = max(-(-batch.tokens // launch.slots), 1)
        launch.launch((launch.blocks, min(needed, launch.programs)), given)


def compare_stores(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.ops.torch.stores.compare_stores`. One launch; may be captured."""
    if not batch.tokens:
        return
    launcher = state.launches.by_op.get("compare_stores")
    if launcher is None:
        fixed = (region_arguments(state), arguments(state.fingerprints, state.stores, len(state.sources)))
        launcher = Launcher(compare_stores_kernel, state, fixed, {"TILE": TILE}, num_warps=WARPS)
        state.launches.by_op["compare_stores"] = launcher
    launcher((programs(state, PROGRAMS_PER_PROCESSOR), 1), arguments(batch.token_ids, batch.writers, batch.tokens))


@triton.jit
def planned(region, step, o_token, tokens):
    """Plan word and slot of each token, and whether the token won its slot."""
    m = o_token < tokens
    word = tl.load(region.p_plan + o_token * PLAN, mask=m, other=0)
    slot = tl.load(region.p_plan + o_token * PLAN + 1, mask=m, other=0)
    usable = (word != 0) & ((word >> 32) - 1 == STATUS_OK)
    claim = tl.load(region.p_claims + slot, mask=usable, other=0)
    return word, slot, usable & (claim == claim_of(step, o_token))


@jit("tokens")
def note_store_kernel(region, sources, p_stores, tokens, BYTES: tl.constexpr):
    """Grid: programs of source groups, times any number of programs over tiles of `SLOTS` of the batch's tokens."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    step = tl.load(region.p_clock + CLOCK_NEXT)
    for i in range(tl.program_id(1), (tokens + SLOTS - 1) // SLOTS, tl.num_programs(1)):
        o_token = i * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
        if BYTES.ABREAST > 0:
            o_token = spread(i, BYTES)
        _word, slot, won = planned(region, step, o_token, tokens)
        if tl.max(won.to(tl.int32), 0) > 0:
            keep(sources, p_stores, slot, won, BYTES)


@jit("tokens")
def compare_stores_kernel(
    region, p_fingerprints, p_stores, sources, p_tokens, p_writers, tokens,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, which share the tiles of the batch's tokens."""
    step = tl.load(region.p_clock + CLOCK_NEXT)
    for i in range(tl.program_id(0), (tokens + TILE - 1) // TILE, tl.num_programs(0)):
        o_token = i * TILE + tl.arange(0, TILE).to(tl.int64)
        word, slot, won = planned(region, step, o_token, tokens)
        for column in range(sources):
            p_noted = p_stores + slot * sources + column
            noted = tl.load(p_noted, mask=won, other=0)
            now = tl.load(p_fingerprints + slot * sources + column, mask=won, other=0)
            tl.store(p_noted, tl.zeros_like(noted), mask=won)
            wrong = won & (noted != 0) & (noted != now)
            if tl.max(wrong.to(tl.int32), 0) > 0:
                position = tl.load(region.p_plan + o_token * PLAN + 2, mask=wrong, other=0)
                token = tl.load(p_tokens + o_token, mask=wrong, other=0).to(tl.int64)
                writer = tl.load(p_writers + (word & 0xFFFFFFFF), mask=wrong, other=-1).to(tl.int64)
                # What is stored there is this forward's.
                report(
                    region, tl.full(slot.shape, KIND_BYTES, tl.int64), wrong, column, slot, position, token, token,
                    position * STATE_VALUES + WRITTEN, noted, now, writer, writer, step, -1, step * 8 + PHASE_POST,
                )  # fmt: skip
