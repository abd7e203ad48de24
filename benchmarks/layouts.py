"""KV layouts of real engines as `KVSource`s over random data: a NaN would be a finding, zeros would hide errors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core import KVSource
from canary_core.region import Role

DSV4_PAGE_BYTES = 65 * 576
"""64 slots of 576 + 8 bytes, padded to a multiple of 576."""


@dataclass(frozen=True, slots=True)
class Layout:
    """``build(slots, layer, half, device)`` makes one layer's half, with random bytes; a layer has all ``halves``;
    ``page_size`` is that of the table."""

    name: str
    build: Callable[[int, int, str, torch.device], tuple[KVSource, ...]]
    halves: tuple[str, ...]
    page_size: int = 1

    def sources(self, slots: int, layers: int, device: torch.device) -> tuple[KVSource, ...]:
        """All sources of a pool, layer by layer."""
        return tuple(s for n in range(layers) for half in self.halves for s in self.build(slots, n, half, device))


def bare(slots: int, layer: int, half: str, device: torch.device) -> tuple[KVSource, ...]:
    """No bytes of its own: every slot is the same row, for cases that look at the mapping only."""
    row = torch.randn(1, 8, device=device)
    return (KVSource(row, half, layer, chunk_bytes=32, slot_stride_bytes=0, dtype=row.dtype),)


def llama(slots: int, layer: int, half: str, device: torch.device) -> tuple[KVSource, ...]:
    """8 KV heads of 128 bfloat16: rows of 2048 bytes."""
    return (_rows(torch.randn(slots, 1024, dtype=torch.bfloat16, device=device), layer, half),)


def mla(slots: int, layer: int, half: str, device: torch.device) -> tuple[KVSource, ...]:
    """Latent of 512 + 64 bfloat16: rows of 1152 bytes."""
    return (_rows(torch.randn(slots, 576, dtype=torch.bfloat16, device=device), layer, half),)


def fp8(slots: int, layer: int, half: str, device: torch.device) -> tuple[KVSource, ...]:
    """8 KV heads of 128 float8: rows of 1024 bytes."""
    rows = torch.randn(slots, 1024, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
    return (_rows(rows, layer, half),)


def shard(slots: int, layer: int, half: str, device: torch.device) -> tuple[KVSource, ...]:
    """One KV head of 128 bfloat16, as a rank of 8 has it: rows of 256 bytes."""
    return (_rows(torch.randn(slots, 128, dtype=torch.bfloat16, device=device), layer, half),)


def fp8_shard(slots: int, layer: int, half: str, device: torch.device) -> tuple[KVSource, ...]:
    """The same of float8: rows of 128 bytes."""
    rows = torch.randn(slots, 128, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
    return (_rows(rows, layer, half),)


def dsv4(slots: int, layer: int, half: str, device: torch.device) -> tuple[KVSource, ...]:
    """DeepSeek-V4's packed pages of 64 slots: 576 bytes a slot, then a strip of 8 scale bytes a slot."""
    pages = -(-slots // 64)
    packed = torch.randint(0, 256, (pages, DSV4_PAGE_BYTES), dtype=torch.uint8, device=device)
    return (
        KVSource(packed, half, layer, 576, slot_stride_bytes=576, page_size=64, page_stride_bytes=DSV4_PAGE_BYTES),
        KVSource(
            packed, f"{half}_scale", layer, 8, slot_stride_bytes=8, page_size=64, page_stride_bytes=DSV4_PAGE_BYTES,
            offset_bytes=64 * 576, role=Role.SCALE,
        ),
    )  # fmt: skip


def heads_first(slots: int, layer: int, half: str, device: torch.device) -> tuple[KVSource, ...]:
    """Pages ``[8 heads, 64 slots, 128]`` of bfloat16: a slot is 8 chunks of 256 bytes."""
    pages = torch.randn(-(-slots // 64), 8, 64, 128, dtype=torch.bfloat16, device=device)
    return (
        KVSource(
            pages, half, layer, chunk_bytes=256, slot_stride_bytes=256, page_size=64, page_stride_bytes=8 * 64 * 256,
            chunks=8, chunk_stride_bytes=64 * 256, dtype=pages.dtype,
        ),
    )  # fmt: skip


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("bare", bare, ("kv",)),
        Layout("bare-pages", bare, ("kv",), page_size=16),
        Layout("llama", llama, ("k", "v")),
        Layout("llama-k", llama, ("k",)),
        Layout("mla", mla, ("kv",)),
        Layout("fp8", fp8, ("k", "v")),
        Layout("fp8-k", fp8, ("k",)),
        Layout("shard", shard, ("k", "v")),
        Layout("fp8-shard", fp8_shard, ("k", "v")),
        Layout("dsv4", dsv4, ("kv",), page_size=64),
        Layout("heads-first", heads_first, ("k",), page_size=64),
    )
}


def _rows(tensor: Tensor, layer: int, half: str) -> KVSource:
    row_bytes = tensor.shape[1] * tensor.element_size()
    return KVSource(tensor, half, layer, chunk_bytes=row_bytes, slot_stride_bytes=row_bytes, dtype=tensor.dtype)
