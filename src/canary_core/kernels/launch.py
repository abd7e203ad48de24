"""What the host sides of the kernels share: the arguments that describe a batch's table, and grid sizes."""

from functools import cache
from typing import Any

import torch

from canary_core.batch import BatchView, SlotTable
from canary_core.state import RegionState

INTERPRETED_PROGRAMS = 3
"""Programs on the interpreter: few, so that each of them goes round its loop."""


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def programs(state: RegionState, per_processor: int) -> int:
    """Size of a persistent grid: it depends on the device only, so a captured launch fits every batch."""
    device = state.records.device
    return INTERPRETED_PROGRAMS if device.type == "cpu" else processors(device) * per_processor


def table_arguments(state: RegionState, table: SlotTable) -> tuple[Any, ...]:
    """``p_table, p_rows, p_map, width, table_stride, extent, map_length, slots, null_slot`` of a kernel."""
    entries, region = table.entries, state.region
    stride = entries.stride(0)
    extent = (entries.shape[0] - 1) * stride + entries.shape[1] if entries.numel() else 0
    slot_map = region.slot_map
    return (
        entries, table.rows, slot_map, table.width, stride, extent, 0 if slot_map is None else len(slot_map),
        region.slots, -1 if region.null_slot is None else region.null_slot,
    )  # fmt: skip


def write_arguments(table: SlotTable) -> tuple[Any, ...]:
    """``p_write_slots, write_length`` of a kernel."""
    return table.write_slots, 0 if table.write_slots is None else len(table.write_slots)


def expected_arguments(batch: BatchView) -> tuple[Any, ...]:
    """``p_expected, expected_width, expected_stride`` of a kernel."""
    expected = batch.expected_tokens
    if expected is None or expected.numel() == 0:
        return None, 0, 0
    return expected, expected.shape[1], expected.stride(0)


def constants(state: RegionState, batch: BatchView, table: SlotTable) -> dict[str, int]:
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
        "ROWS": max(1 << (batch.rows - 1).bit_length(), 1) if batch.rows else 1,
    }
