"""`Compared`: a Canary, as comparisons of its memory see it."""

from collections.abc import Mapping
from typing import Protocol

from canary_core.ops.state import RegionState


class Compared(Protocol):
    """The part of `Canary` used here."""

    @property
    def states(self) -> Mapping[str, RegionState]:
        """Device memory by region."""

    @property
    def backend(self) -> str:
        """Name of the running ops."""
