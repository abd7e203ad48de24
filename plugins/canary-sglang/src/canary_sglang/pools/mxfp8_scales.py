"""MXFP8's scales where SGLang keeps them for pages of 128: those of one page are interleaved, in the order in which a
matrix instruction takes them.

A page of a layer's scales is ``[heads, 32, page / 32, scales of a row]``: slot ``i`` of the page lies in row
``i % 32 * (page / 32) + i // 32`` of every head. So they are a region of their own, whose slots are in that order,
behind a map from the pool's slots.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import Part, paged_source
from canary_core import AttachError, PoolAdapter, Region, Role
from canary_sglang.pools.parts import NULL_SLOT, Unguarded, tensor_bytes

SCALES = "full_scale"
"""What the region is called; its slots are behind the map from those of ``full``."""

BLOCK = 32
"""Rows that lie side by side are as many slots apart."""


def interleaved_scales(pool: Any, layers: Sequence[int] | None, refusal: str | None) -> list[PoolAdapter]:
    """The scales of K and V of a pool that has them interleaved. ``layers``: as the model numbers them, None for those
    that the pool says. ``refusal``: why they are left out, None if they aren't."""
    if type(pool).__name__ != "MHATokenToKVPoolMXFP8" or not pool.mxfp8_sf_interleaved:
        return []
    first = int(pool.start_layer)
    if refusal is None:
        try:
            return [InterleavedScales(pool, layers or range(first, first + pool.layer_num))]
        except AttachError as error:
            refusal = f"{type(pool).__name__} is not as expected: {error}"
    return [Unguarded(SCALES, tensor_bytes([*pool.k_scale_buffer, *pool.v_scale_buffer]), refusal)]


class InterleavedScales(PoolAdapter):
    """The scales of an `MHATokenToKVPoolMXFP8` with interleaved pages as a region."""

    def __init__(self, pool: Any, layers: Sequence[int]) -> None:
        halves = {"k_scale": pool.k_scale_buffer, "v_scale": pool.v_scale_buffer}
        sources = tuple(
            paged_source(_rows(tensors[i]), Part(half, layer, role=Role.SCALE), slot_dim=2)
            for i, layer in enumerate(layers)
            for half, tensors in halves.items()
        )
        page_slots = int(pool.page_size)
        slot_map = interleaved(int(pool.size) + page_slots, page_slots, sources[0].tensor.device)
        self._region = Region(SCALES, len(slot_map), sources, slot_map=slot_map, null_slot=NULL_SLOT)

    def regions(self) -> Sequence[Region]:
        """The one."""
        return (self._region,)


def interleaved(slots: int, page_slots: int, device: torch.device) -> Tensor:
    """Where the scales of each slot are, int32 ``[slots]``: slot 0 stays where it is, all others stay in their page."""
    slot = torch.arange(slots, dtype=torch.int32, device=device)
    place = slot % page_slots
    return slot - place + place % BLOCK * (page_slots // BLOCK) + place // BLOCK


def _rows(scales: Tensor) -> Tensor:
    """``[pages, heads, 32, page / 32, n]`` as bytes ``[pages, heads, page, n]``."""
    return scales.view(torch.uint8).flatten(2, 3)
