"""Tests that take turns: each commit's CI runs a sixth of them (``CI_TURN`` of `.ci/run`). Elsewhere all run."""

from collections.abc import Iterable

import pytest

TURNS = 6
MARKER = (
    "takes_turns(covered_by, unit=None): CI runs it for one commit of six; `covered_by` says what runs for each and "
    "nearly covers it. Tests of one unit, such as those that share an engine, have one turn"
)


def those_of(items: Iterable[pytest.Item], turn: int) -> list[pytest.Item]:
    """The tests that run in that turn, in their order: all that have no turns, and every sixth unit of the others."""
    units: dict[str, int] = {}
    return [item for item in items if _number(item, units) in (None, turn % TURNS)]


def _number(item: pytest.Item, units: dict[str, int]) -> int | None:
    mark = item.get_closest_marker("takes_turns")
    if mark is None:
        return None
    return units.setdefault(mark.kwargs.get("unit", item.nodeid), len(units)) % TURNS
