"""fingerprint_record: `fingerprint` and `record` of a forward with few writes, in one launch.

Neither waits for the other, since `check` has kept the old records for `fingerprint` (see `records.PLAN_WORDS`).
"""

import triton.language as tl

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.kernels.fields import OwnTokens
from canary_core.ops.kernels.fingerprint import (
    fingerprint,
    fingerprint_group,
    fingerprint_written,
    written_launches,
)
from canary_core.ops.kernels.histories import history_arguments
from canary_core.ops.kernels.launch import (
    VARYING,
    Launcher,
    arguments,
    batch_arguments,
    jit,
    region_arguments,
    source_arguments,
)
from canary_core.ops.kernels.record import record, record_written
from canary_core.ops.kernels.samples import sample_arguments
from canary_core.ops.kernels.tiles import WRITE_TILE, WRITE_TILES, constants, is_long
from canary_core.ops.state import RegionState

FEW_ROWS, FEW_TOKENS = 256, 1024
"""Largest batch with few writes: a prefill's fingerprints want all registers, and its records many warps."""
TILE = 32
"""New tokens recorded at a time by a program: one for each lane of a warp."""
RECORDING = tl.constexpr(16)
"""Columns of recording programs, beside the fingerprinting ones."""


def fingerprint_record(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.ops.torch.fingerprint_record.fingerprint_record`. One launch, and one more for each source group
    but the first; for a forward with many writes, or long slots, the launches of both ops. May be captured."""
    groups = state.sources.groups
    given, launches = batch_arguments(state, batch, table)
    little = 0 < batch.tokens <= FEW_TOKENS and batch.rows <= FEW_ROWS
    launcher = launches.by_op.get("fingerprint_record") if little else None
    if launcher is None:
        if not (little and groups) or is_long(state, groups[0]):
            fingerprint(state, batch, table)
            record(state, batch, table)
            return
        first = groups[0]
        read = constants(first, WRITE_TILES.of(state, first))
        every = {"TABLE": launches.constants, "TILE": TILE, "BYTES": read}
        fixed = (
            region_arguments(state), sample_arguments(state), history_arguments(state), source_arguments(state, first),
            arguments(state.judged_nulls),
        )  # fmt: skip
        columns = len(first.columns) + RECORDING.value
        launcher = Launcher(fingerprint_record_kernel, state, fixed, every, columns, num_warps=WRITE_TILE.warps)
        launches.by_op["fingerprint_record"] = launcher
    tiles = -(-batch.tokens // WRITE_TILE.slots) + (state.judged_nulls > 0)
    launcher((launcher.columns, tiles), given)
    if len(groups) > 1:
        for launch in written_launches(state)[1:]:
            fingerprint_group(state, batch, launch)


@jit(*VARYING, "judged_nulls")
def fingerprint_record_kernel(
    region, samples, p_histories, sources, judged_nulls,
    batch, p_expected, table, p_write_slots,
    expected_width, expected_stride, width, table_stride, extent, map_length, write_length, rows, tokens,
    TABLE: tl.constexpr, TILE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Grid: as in `fingerprint_kernel`, and `RECORDING` more columns of recording programs."""
    i_recording = tl.program_id(0) - (tl.num_programs(0) - RECORDING)
    if i_recording < 0:
        fingerprint_written(region, sources, batch.p_tokens, batch.p_writers, tokens, judged_nulls, BYTES)
    else:
        own_tokens = OwnTokens(p_tokens=p_expected, width=expected_width, stride=expected_stride)
        record_written(
            region, samples, p_histories, batch, own_tokens, rows, tokens,
            i_recording * tl.num_programs(1) + tl.program_id(1), tl.num_programs(1) * RECORDING, TABLE, TILE,
        )  # fmt: skip
