"""The engines that tests share, by name."""

import platform
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Setup:
    """``model`` and ``options``: as of `SmallEngine`. ``layers``, ``halves``: what a flip can be in. ``regions``: names
    of the regions that guard it. ``reach``: how many of a request's last positions every layer still reads.
    ``process``: engines of one number share a process. ``older``: CI runs it on the older release, too.
    ``turns``: CI runs it for one commit of six."""

    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    halves: tuple[str, ...] = ("k", "v")
    regions: tuple[str, ...] = ("full",)
    reach: int = 1000
    process: int = 0
    older: bool = False
    turns: bool = True


NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
SETUPS = {
    "llama": Setup(older=True, turns=False),
    "crowded": Setup(options=dict(num_gpu_blocks_override=9), older=True),
    "uncached": Setup(options=dict(enable_prefix_caching=False)),
    "async": Setup(options=dict(async_scheduling=True)),
    "fp8": Setup(options=dict(kv_cache_dtype="fp8"), process=1),
    "window": Setup("mistral", regions=("window",), reach=40, process=1),
    "hybrid": Setup("gemma3", layers=4, regions=("full", "window"), reach=40, process=1, older=True, turns=False),
    "mla": Setup("deepseek", options=dict(dtype="bfloat16"), halves=("kv",), process=1),
    "states": Setup("falcon_h1", dict(enable_prefix_caching=False), regions=("full", "state")),
    # The last of its process: vLLM can't make another engine in it.
    "ngram": Setup(options=dict(speculative_config=NGRAM), process=1),
}
"""``crowded``: so few blocks that requests are preempted. ``hybrid``: full and sliding layers take turns on the same
memory. ``states``: full layers and recurrent states do."""


def lacking(name: str) -> str | None:
    """Why this machine can't run an engine of `SETUPS`; None where it can, or where the name is none of them."""
    setup = SETUPS.get(name)
    if setup is None or setup.options.get("kv_cache_dtype") != "fp8" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    if torch.cpu._is_avx512_supported() or getattr(torch.cpu, "_is_amx_tile_supported", bool)():
        return None
    return "vLLM's fp8 cache on a CPU requires AVX-512 or AMX, and this processor has neither"
