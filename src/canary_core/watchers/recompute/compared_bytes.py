"""`ComparedBytes`: what came of the comparison of a request's bytes with their fingerprints."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComparedBytes:
    """Of a request: number of ``slots`` in all regions, and of slots whose bytes ``changed`` since the write. share:
    part of the bytes with a fingerprint; the rest is not compared. region, source, position: of the first changed
    bytes. at_least: whether there may be more."""

    slots: int
    changed: int
    share: float
    region: str | None = None
    source: str | None = None
    position: int | None = None
    at_least: bool = False

    @property
    def sentence(self) -> str:
        """For people."""
        if self.changed:
            place = f"{self.region} {self.source}, position {self.position}"
            number = f"{'at least ' * self.at_least}{self.changed} of {self.slots} slots"
            return f"{number} changed since they were written ({place})"
        if not self.share:
            return f"not compared, {self.slots} slots have no fingerprints"
        part = "" if self.share >= 1 else f", {self.share:.2g} of the bytes compared: the others have no fingerprints"
        return f"{self.slots} slots as written{part}"

    @property
    def finding(self) -> str:
        """Of changed ones, for people."""
        return (
            f"its bytes have changed since they were written, first in {self.region} {self.source} at position "
            f"{self.position}: a stray write, a race, a bad copy, or a flipped bit; a `bytes` finding says more"
        )
