"""What the host sides of the kernels share: their arguments, and a launch that costs a few microseconds.

Triton's own launch looks at each argument and at each constant of the module again, every time: tens of microseconds
for kernels with as many as ours. Here arguments are looked at once for as long as they live, a region's once for good
and a batch's once a forward, and a kernel that was compiled for their like is launched directly.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.state import RegionState, SourceShape

INTERPRETED_PROGRAMS = 3
"""Programs on the interpreter: few, so that each of them goes round its loop."""

_DIRECT = tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 3)
"""Since Triton 3.3 a compiled kernel takes all of its function's arguments, constants included."""

_kinds: dict[tuple[Any, ...], int] = {}


@dataclass(frozen=True, slots=True)
class Arguments:
    """Consecutive arguments of a kernel: as Triton's compiler wants to see them, as a compiled kernel takes them
    (addresses for tensors), and a number that stands for all that compiled code may depend on in them."""

    objects: tuple[Any, ...]
    raw: tuple[int | None, ...]
    kind: int


def arguments(*objects: Tensor | int | None) -> Arguments:
    """Looks at each of ``objects`` the way Triton specialises on it: type, alignment to 16, equality to 1."""
    raw: list[int | None] = []
    seen: list[Any] = []
    for value in objects:
        if value is None:
            raw.append(None)
            seen.append(None)
        elif isinstance(value, int):
            raw.append(value)
            seen.append((value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31))
        else:
            address = value.data_ptr()
            raw.append(address)
            seen.append((value.dtype, address % 16 == 0))
    return Arguments(objects, tuple(raw), _kinds.setdefault(tuple(seen), len(_kinds)))


def launch(
    state: RegionState,
    kernel: Any,
    grid: tuple[int, int],
    given: tuple[Arguments, ...],
    constants: dict[str, int],
) -> None:
    """Launches ``kernel[grid](*given, **constants)`` on the current stream. ``constants`` are in the order of the
    kernel's parameters, then ``num_warps``. Never reads back, never allocates."""
    values = tuple(constants.values())
    key = (kernel, values, *[a.kind for a in given])
    compiled = state.compiled.get(key)
    if compiled is None:
        compiled = kernel[grid](*[o for a in given for o in a.objects], **constants)
        # The interpreter gives None.
        if _DIRECT and compiled is not None:
            state.compiled[key] = compiled
        return
    raw = [value for a in given for value in a.raw]
    stream = triton.runtime.driver.active.get_current_stream(state.records.device.index)
    compiled.run(
        *grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *raw, *values[:-1]
    )  # fmt: skip


def region_arguments(state: RegionState) -> Arguments:
    """``p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows,
    region, slots, null_slot``: what every kernel takes first."""
    known = state.arguments.get("region")
    if known is None:
        shared, null = state.shared, state.region.null_slot
        known = state.arguments["region"] = arguments(
            state.records.view(torch.int64), state.records, state.claims, state.plan, state.heads, state.chains,
            state.cursors, shared.counters, shared.clock, shared.ring, shared.ring.shape[0], state.index,
            state.region.slots, -1 if null is None else null,
        )  # fmt: skip
    return known


def source_arguments(state: RegionState, shape: SourceShape) -> Arguments:
    """``p_descriptors, p_columns, n_columns, p_keys, p_salts, p_fingerprints, sources``."""
    known = state.arguments.get(shape)
    if known is None:
        known = state.arguments[shape] = arguments(
            state.descriptors, shape.columns, len(shape.columns), state.keys, state.salts, state.fingerprints,
            len(state.sources),
        )  # fmt: skip
    return known


def batch_arguments(
    state: RegionState, batch: BatchView, table: SlotTable
) -> tuple[Arguments, dict[str, int]]:
    """``p_prefix, p_new, p_writers, p_anchors, p_tokens, p_positions, p_expected, expected_width, expected_stride,
    p_table, p_rows, p_map, width, table_stride, extent, map_length, p_write_slots, write_length, rows, tokens``, and
    the compile-time constants that go with them."""
    last = state.arguments.get("batch")
    if last is not None and last[0] is batch and last[1] is table:
        return last[2], last[3]
    entries, writes, slot_map, expected = table.entries, table.write_slots, state.region.slot_map, batch.expected_tokens
    stride = entries.stride(0)
    if expected is not None and expected.numel() == 0:
        expected = None
    found = arguments(
        batch.prefix_lens, batch.new_lens, batch.writers, batch.anchors, batch.token_ids, batch.positions,
        expected, 0 if expected is None else expected.shape[1], 0 if expected is None else expected.stride(0),
        entries, table.rows, slot_map, entries.shape[1], stride,
        (entries.shape[0] - 1) * stride + entries.shape[1] if entries.numel() else 0,
        0 if slot_map is None else slot_map.shape[0], writes, 0 if writes is None else writes.shape[0],
        batch.rows, batch.tokens,
    )  # fmt: skip
    constants = _table_constants(state, batch, table)
    state.arguments["batch"] = (batch, table, found, constants)
    return found, constants


def _table_constants(state: RegionState, batch: BatchView, table: SlotTable) -> dict[str, int]:
    """Compile-time constants: what is fixed for an engine, and the batch's rows rounded up to a power of two."""
    pool_rows, pool_slots = table.pool_page or (0, 0)
    return {
        "PAGE_SIZE": table.page_size,
        "RING": table.ring_slots,
        "STORED": table.stored_tokens,
        "WINDOW": state.region.attention_window,
        "POOL_ROWS": pool_rows,
        "POOL_SLOTS": pool_slots,
        "GROUP": state.region.tokens_per_slot,
        "ROWS": 1 << (batch.rows - 1).bit_length() if batch.rows else 1,
    }


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def programs(state: RegionState, per_processor: int) -> int:
    """Size of a persistent grid: it depends on the device only, so a captured launch fits every batch."""
    device = state.records.device
    return INTERPRETED_PROGRAMS if device.type == "cpu" else processors(device) * per_processor
