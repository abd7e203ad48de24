"""MXFP8's scales in pages of 128. SGLang interleaves the scales of one page, in the order of a matrix instruction's
reads.

A page of a layer's scales is ``[heads, 32, page / 32, scales of a row]``: slot ``i`` of the page lies in row ``i % 32 *
(page / 32) + i // 32`` of every head. So the scales are a region of their own, with slots in row order. Its
``slot_map`` gives the scales' slot for each slot of the pool.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import Part, RegionPool, paged_source
from canary_core import PoolAdapter, Region, Role
from canary_sglang.pools.parts import NULL_SLOT, Unguarded, model_layers, or_unguarded, tensor_bytes

SCALES = "full_scale"
"""Name of the region."""

BLOCK = 32
"""Distance of the slots in two neighbouring rows."""


def interleaved_scales(pool: Any, layers: Sequence[int] | None, refusal: str | None) -> list[PoolAdapter]:
    """The scales of K and V of a pool that interleaves them; empty for other pools. ``layers``: numbers of the layers
    in the model, None for the pool's own. ``refusal``: why the scales can't be guarded, None if they can."""
    if type(pool).__name__ != "MHATokenToKVPoolMXFP8" or not pool.mxfp8_sf_interleaved:
        return []
    scales = [*pool.k_scale_buffer, *pool.v_scale_buffer]
    if refusal is not None:
        return [Unguarded(SCALES, tensor_bytes(scales), refusal)]
    return [or_unguarded(SCALES, pool, lambda: _scale_pool(pool, model_layers(pool, layers)), [scales])]


def _scale_pool(pool: Any, layers: Sequence[int]) -> RegionPool:
    """The scales of an `MHATokenToKVPoolMXFP8` with interleaved pages. Raises `AttachError` if not as expected."""
    halves = {"k_scale": pool.k_scale_buffer, "v_scale": pool.v_scale_buffer}
    sources = tuple(
        paged_source(_rows(tensors[i]), Part(half, layer, role=Role.SCALE), slot_dim=2)
        for i, layer in enumerate(layers)
        for half, tensors in halves.items()
    )
    page_slots = int(pool.page_size)
    slot_map = _scale_slots(int(pool.size) + page_slots, page_slots, sources[0].tensor.device)
    return RegionPool(Region(SCALES, len(slot_map), sources, slot_map=slot_map, null_slot=NULL_SLOT))


def _scale_slots(slots: int, page_slots: int, device: torch.device) -> Tensor:
    """Places of each slot's scales, int32 ``[slots]``. Each slot stays in its page, and slot 0 is slot 0."""
    slot = torch.arange(slots, dtype=torch.int32, device=device)
    place = slot % page_slots
    return slot - place + place % BLOCK * (page_slots // BLOCK) + place // BLOCK


def _rows(scales: Tensor) -> Tensor:
    """``[pages, heads, 32, page / 32, n]`` as bytes ``[pages, heads, page, n]``."""
    return scales.view(torch.uint8).flatten(2, 3)
