"""What follows the stores of a runner's attention layers."""

from collections.abc import Sequence
from typing import Any

from canary_adapters import layer_numbers
from canary_core import Canary, Patches
from canary_vllm.compat import runners
from canary_vllm.pools.pool import Group


def follow_stores(patches: Patches, canary: Canary, runner: Any, groups: Sequence[Group]) -> None:
    """With ``CANARY_STORE_CHECK`` Canary is told, until ``patches`` are undone, after each store of a layer of
    ``groups``: by the operation that the layer's layout was found with, so all of its bytes are stored. Where attention
    itself stores, that is not called, and nothing is told."""
    every, places = runners.layers(runner), dict[Any, tuple[int, str]]()
    for group in groups if canary.step.stores.on else ():
        described = {source.layer for source in canary.regions[group.region].sources}
        given = layer_numbers(group.layers).items()
        places |= {every[name].impl: (number, group.region) for name, number in given if number in described}

    def stored(_: Any, impl: Any, *__: Any, **___: Any) -> None:
        if impl in places:
            number, region = places[impl]
            canary.step.stored(number, region=region)

    for kind in {type(impl) for impl in places}:
        patches.follow(kind, "do_kv_cache_update", stored)
