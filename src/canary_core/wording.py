"""Numbers and lists in sentences."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def numbered(number: int, noun: str) -> str:
    """``1 slot``, ``3 slots``"""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def by_name(counts: Mapping[Any, int]) -> dict[str, int]:
    """``counts`` by members of an enum, by their names in lower case."""
    return {member.name.lower(): number for member, number in counts.items()}


def joined(words: Sequence[str]) -> str:
    """``a, b and c``"""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def listed(words: Sequence[str], most: int) -> str:
    """The first ``most`` of all: ``a, b and 3 more``"""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run in ascending ``numbers``."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found
