"""Eviction takes one node out of the prefix cache and frees the slots of another one, which stays."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PHANTOM
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The tree says which slots to free; here they are taken from the end of what it still has."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    def _drain_device_frees(usual: Any, cache: Any, device_frees: Any) -> None:
        for component, evicted in device_frees.items():
            cached = cache.all_values_flatten()
            count = sum(len(slots) for slots in evicted)
            if count and len(cached) >= count:
                stage.strike()
                device_frees[component] = [cached[-count:].clone()]
        usual(cache, device_frees)

    with patched(UnifiedRadixCache, "_drain_device_frees", _drain_device_frees):
        yield


def traffic(stage: Any) -> None:
    """Alice and Bob are served; Dora, who comes again and again, needs room; Carol begins like Bob."""
    asked = stage.tokens("bob", 30)
    stage.submit("alice", stage.tokens("alice", 30), 2)
    finish(stage)
    stage.submit("bob", asked, 2)
    finish(stage)
    stage.submit("dora", stage.tokens("dora", 50), 30)
    for _ in range(6):
        stage.step()
    stage.submit("carol", [*asked, *stage.tokens("carol", 3)], 4)
    finish(stage)


BUG = Bug(
    title="Eviction frees the slots of a node that stays",
    cause="The slots of an evicted node and those of another one are mixed up, and a later prompt hits freed slots.",
    row=PHANTOM,
    issues=("local-inference-lab/vllm#480", "vllm#42273"),
    setup="small",
    broken=broken,
    traffic=traffic,
    default=Found(
        "double_free",
        0,
        "was freed by the engine although it was free, since ... freed it ...: freed twice",
        wrong="the first of the two frees was the wrong one: it was of slots that a node still has",
    ),
)
