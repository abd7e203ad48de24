"""SGLang's own pools, made by hand, and their bytes."""

from types import SimpleNamespace
from typing import Any

import torch
from canary_sglang.pools.pool import SGLangPool

from canary_core.testing import read_bytes, write_bytes

COMMON = dict(device="cpu", enable_memory_saver=False)


def describe(pool: Any, window: int | None = None) -> SGLangPool:
    """The adapter for a pool, as a runner would hold it."""
    return SGLangPool(SimpleNamespace(token_to_kv_pool=pool, sliding_window_size=window))


def flip(source: Any, slot: int) -> None:
    """One bit of a slot."""
    where = torch.tensor([slot], device=source.tensor.device)
    content = read_bytes(source, where)
    content[0, source.slot_bytes // 2] ^= 4
    write_bytes(source, where, content)
