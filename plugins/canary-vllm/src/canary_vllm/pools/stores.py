"""Follows the stores of a runner's attention layers."""

from collections.abc import Sequence
from typing import Any

from canary_adapters import layer_numbers
from canary_core import Canary, Patches
from canary_vllm.compat import runners
from canary_vllm.pools.pool import Group


def follow_stores(patches: Patches, canary: Canary, runner: Any, groups: Sequence[Group]) -> None:
    """With ``CANARY_STORE_CHECK``, until ``patches`` are undone, reports each store of a layer of ``groups`` to Canary:
    after the operation by which the layer's layout was found, so all of its bytes are stored. Where attention itself
    stores, the operation is not called, and nothing is reported."""
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
