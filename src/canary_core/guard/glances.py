"""Facts of a Canary for parts that must not keep it alive: each takes what a weak reference gives."""

from collections.abc import Collection
from typing import Any, Protocol

from canary_core.config import CanaryConfig
from canary_core.events import Event

LOOKED_AT = 64
"""Forwards within which a plugin has said who can compute requests again."""


class Glanced(Protocol):
    """The part of `Canary` used here."""

    config: CanaryConfig
    verifier: Any

    @property
    def step(self) -> Any:
        """Calls around a forward."""


def calls(canary: Glanced | None) -> int:
    """Number of calls of ``canary`` for a forward, whatever the result."""
    return -1 if canary is None else int(canary.step.forwards + canary.step.unchecked + canary.step.passed_by)


def unguarded(canary: Any, unended: Collection[object]) -> str | None:
    """Why forwards pass by ``canary``, already reported; None where they do not, or it is not ``unended`` or gone."""
    if canary is not None and canary.step.paused:
        return "paused"
    return "off" if canary in unended and not canary.enabled else None


def unable_to_recompute(canary: Glanced | None) -> Event | None:
    """The event where ``CANARY_RECOMPUTE`` is on, forwards go on, and nobody can compute anything again."""
    if canary is None or not canary.config.recompute or canary.verifier or canary.step.forwards < LOOKED_AT:
        return None
    from canary_core.recomputer import recompute_off

    return recompute_off(
        "CANARY_RECOMPUTE is on, and nobody can compute requests of this pool again: see docs/verify.md"
    )
