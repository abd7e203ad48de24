"""Which layers and halves differ, in as few words as say it exactly."""

from collections.abc import Collection, Sequence

from canary_core.region import KVSource
from canary_core.wording import joined, runs


def positions(first: int, count: int) -> str:
    """``positions 4 to 7``"""
    return f"position {first}" if count == 1 else f"positions {first} to {first + count - 1}"


def fold(sources: Sequence[KVSource], differing: Sequence[int], state: str = "") -> str:
    """``differing``: indices among ``sources``, at least one. For example "1 of 64 sources differs: layer 3 V", or "64
    of 64 sources differ: every layer, K and V"; with ``state`` "1 of 64 sources is as before: layer 3 V"."""
    # A layer may have several sources of one half, where its bytes are in several places.
    halves: dict[str, set[int]] = {}
    every: dict[str, set[int]] = {}
    for source in sources:
        every.setdefault(source.half, set()).add(source.layer)
    for index in differing:
        halves.setdefault(sources[index].half, set()).add(sources[index].layer)
    alike: dict[tuple[str, bool], list[str]] = {}
    for half, layers in halves.items():
        whole = layers == every[half] and len(layers) > 1
        alike.setdefault(("every layer," if whole else _layers(layers), whole), []).append(_half(half))
    said = "; ".join(f"{where} {joined(names)}" for (where, _), names in alike.items())
    verb = "differs" if len(differing) == 1 else "differ"
    if state:
        verb = f"{'is' if len(differing) == 1 else 'are'} {state}"
    return f"{len(differing)} of {len(sources)} sources {verb}: {said}"


def _half(half: str) -> str:
    return half.upper() if len(half) <= 2 else half


def _layers(layers: Collection[int]) -> str:
    """``layers 0, 3 to 5 and 9``"""
    all_runs = runs(sorted(layers))
    pair = len(all_runs) == 1
    said = [str(a) if a == b else f"{a} and {b}" if pair and b == a + 1 else f"{a} to {b}" for a, b in all_runs]
    return f"{'layer' if len(layers) == 1 else 'layers'} {joined(said)}"
