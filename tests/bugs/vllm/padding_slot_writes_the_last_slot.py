"""The slot of a padded token is -1, and the store writes it to the last slot of the pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PADDING
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The store of a decode gets one token more, as the batch is filled up."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def do_kv_cache_update(usual: Any, impl: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        usual(impl, layer, key, value, cache, slots)
        if len(slots) == 2:
            stage.strike()
            last = torch.tensor([cache.shape[0] * 32 - 1], dtype=slots.dtype)
            usual(impl, layer, key[:1], value[:1], cache, last)

    with patched(CPUAttentionBackendImpl, "do_kv_cache_update", do_kv_cache_update):
        yield


def traffic(stage: Any) -> None:
    """All blocks were in use. Alice and Bob decode."""
    for number in range(2):
        stage.submit(f"other{number}", stage.tokens(f"other{number}", 120), 8)
        finish(stage)
    stage.submit("alice", stage.tokens("alice", 24), 10)
    stage.submit("bob", stage.tokens("bob", 31), 16)
    finish(stage)


BUG = Bug(
    title="The padding slot is the last slot of the pool",
    cause="Slot -1 of padded tokens wraps around to the last slot, where a cached block is.",
    row=PADDING,
    issues=("vllm#43869", "vllm#57156"),
    setup="crowded",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 20, "the bytes of slot 287 ... changed since ... wrote them ...: a stray write"),
)
