"""Versions of installed distributions, without an import of any."""

from collections.abc import Iterable
from importlib import metadata


def version(distribution: str) -> str | None:
    """None where it is not installed as a package."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Of the installed ones, by name."""
    return {name: found for name in distributions if (found := version(name)) is not None}
