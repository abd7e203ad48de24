"""Canary's own memory beside the part of a model's pool that one GPU has: allocated, or on torch's meta device.

``python -m benchmarks.shards`` prints the table; ``--device cuda`` allocates pool and records for real, 32 GB of pool a
region, and asks the allocator.
"""

import argparse
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from canary_core import CanaryConfig, KVSource, Region
from canary_core.ops.state import RegionState, Shared
from canary_core.region import RegionKind

POOL_BYTES = 64 << 30
"""Of a shard, over all regions: what is left beside the weights of an 80 GB card, or less."""
REAL_BYTES = 32 << 30
"""The same of a region, where it is allocated."""


@dataclass(frozen=True, slots=True)
class Part:
    """A region: ``layers``, each with ``halves`` rows of ``row_bytes``."""

    layers: int
    halves: tuple[str, ...]
    row_bytes: int
    kind: RegionKind = RegionKind.FULL


KV = ("k", "v")
SHARDS: dict[str, tuple[Part, ...]] = {
    "Llama 8B, bfloat16": (Part(32, KV, 2048),),
    "Llama 70B, 8 GPUs, bfloat16": (Part(80, KV, 256),),
    "Llama 70B, 8 GPUs, fp8": (Part(80, KV, 128),),
    "gpt-oss-120b, 8 GPUs, bfloat16": (Part(18, KV, 128), Part(18, KV, 128, RegionKind.WINDOW)),
    "Qwen3-235B, 4 GPUs, bfloat16": (Part(94, KV, 256),),
    "DeepSeek-V3 (MLA), bfloat16": (Part(61, ("kv",), 1152),),
    "DeepSeek-V3 (MLA), fp8": (Part(61, ("kv",), 656),),
    "DeepSeek-V4, packed window pool": (Part(61, ("kv", "kv_scale"), 584),),
    "Qwen3-Next, states of 36 layers": (Part(36, ("conv", "ssm"), 1 << 19, RegionKind.STATE),),
}
"""By name the regions of one GPU."""


def share(parts: tuple[Part, ...], device: str = "meta", **settings: object) -> float:
    """Canary's memory beside one byte of the shard's pool."""
    pool = ours = 0
    for part in parts:
        total = REAL_BYTES if device == "cuda" else POOL_BYTES // len(parts)
        region = _region(part, total, torch.device(device))
        began = torch.cuda.memory_allocated() if device == "cuda" else 0
        config = CanaryConfig.load(**settings)
        state = RegionState(region, 0, Shared.allocate(config, region.device), config)
        ours += torch.cuda.memory_allocated() - began if device == "cuda" else state.memory_bytes
        pool += region.pool_bytes
        del state, region
    return ours / pool


def _region(part: Part, pool_bytes: int, device: torch.device) -> Region:
    rows = {half: _width(part, half) for half in part.halves}
    slots = pool_bytes // (part.layers * sum(rows.values()))
    sources = [
        KVSource(
            torch.empty(slots, rows[half], dtype=torch.uint8, device=device), half, layer,
            chunk_bytes=rows[half], slot_stride_bytes=rows[half],
        )
        for layer in range(part.layers)
        for half in part.halves
    ]  # fmt: skip
    window = 128 if part.kind is RegionKind.WINDOW else None
    return Region("kv", slots, tuple(sources), kind=part.kind, window_tokens=window)


def _width(part: Part, half: str) -> int:
    """A packed row has 8 bytes of scales at its end."""
    if "kv_scale" in part.halves:
        return 8 if half == "kv_scale" else part.row_bytes - 8
    return part.row_bytes


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.shards")
    parser.add_argument("--device", choices=("meta", "cuda"), default="meta")
    device = parser.parse_args().device
    table = Table("pool", "CANARY_MEMORY=exact", "as it is", "with the store check")
    for name, parts in SHARDS.items():
        ways = (dict(memory="exact"), {}, dict(store_check=True))
        table.add_row(name, *(f"{share(parts, device, **way):.2%}" for way in ways))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
