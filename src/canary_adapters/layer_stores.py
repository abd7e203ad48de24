"""Follows the stores of an engine's attention layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from canary_adapters.layer_numbers import layer_numbers
from canary_core import Canary, Patches


def follow_stores(
    patches: Patches, canary: Canary, operation: str, owners: Mapping[str, Any], regions: Mapping[str, Sequence[str]]
) -> None:
    """With ``CANARY_STORE_CHECK``, until ``patches`` are undone, reports each store of a layer to Canary: after
    ``operation``, by which the layer's layout was found, so all of its bytes are stored. Where attention itself stores,
    the operation is not called, and nothing is reported. ``owners``: whose method it is, by the layer's name.
    ``regions``: names of the layers of each."""
    places: dict[Any, tuple[int, str]] = {}
    for region, names in regions.items() if canary.step.stores.on else ():
        described = {source.layer for source in canary.regions[region].sources}
        given = layer_numbers(names).items()
        places |= {owners[name]: (number, region) for name, number in given if number in described}

    def stored(_: Any, owner: Any, *__: Any, **___: Any) -> None:
        if owner in places:
            number, region = places[owner]
            canary.step.stored(number, region=region)

    for kind in {type(owner) for owner in places}:
        patches.follow(kind, operation, stored)
