"""How much the scrub does after each forward: a share of time, or bytes."""

import math
import re
import time
from dataclasses import dataclass

from canary_core.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, slots=True)
class ScrubBudget:
    """Either ``share`` of the time (0 to 1) or ``step_bytes`` per forward."""

    share: float | None = None
    step_bytes: int = 0

    @classmethod
    def parse(cls, text: str) -> "ScrubBudget":
        """``1%``, ``64MiB``, ``4096`` (bytes) or ``0``. Raises `ConfigError`."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[KMG]?i?B)?\s*", text, re.IGNORECASE)
        if match is None:
            raise ConfigError(
                "CANARY_SCRUB_BUDGET must be a share of time such as 1% or bytes per forward such as 64MiB, got "
                f"{text!r}"
            )
        number, unit = float(match[1]), (match[2] or "").upper()
        if unit != "%":
            return cls(step_bytes=int(number * _UNITS[unit]))
        if number > 100:
            raise ConfigError(f"CANARY_SCRUB_BUDGET must be at most 100%, got {text!r}")
        return cls(share=number / 100)


class Pace:
    """Turns a `ScrubBudget` into scrubs: how many forwards share one, and how many bytes it reads.

    A share of time needs the forwards' length (on the host's clock), the scrub's speed (measured once, at attach) and
    ``launch_s``, the seconds of it that read nothing. Where those would be most of what a forward may spend, one scrub
    serves several forwards.

    A forward counts as long as the last one, at most as the last ones on average: after a long prefill, decode steps
    don't pay for its length.
    """

    WEIGHT = 0.05
    """Weight of the newest forward in the average."""
    LAUNCH_SHARE = 0.25
    """Most of a scrub's time that goes into its launches."""
    MOST_FORWARDS = 64
    """That share a scrub at most: its pause stays short, however small the budget."""

    def __init__(self, budget: ScrubBudget, bytes_per_s: float, launch_s: float = 0.0) -> None:
        self.budget = budget
        self._bytes_per_s = bytes_per_s
        self._launch_s = launch_s
        self._last: float | None = None
        self._average_s = 0.0
        self._step_s = 0.0

    @property
    def off(self) -> bool:
        """Whether there is never anything to scrub."""
        return not self.budget.share and not self.budget.step_bytes

    def step(self) -> None:
        """A forward ended now. A pause of over a second is the engine idling, not a forward."""
        now = time.perf_counter()
        if self._last is not None and now - self._last < 1.0:
            took = now - self._last
            self._average_s += (took - self._average_s) * (self.WEIGHT if self._average_s else 1.0)
            self._step_s = min(took, self._average_s)
        self._last = now

    def pause(self) -> None:
        """The engine idles: the time until the next forward is none."""
        self._last = None

    @property
    def forwards(self) -> int:
        """Forwards that share one scrub."""
        allowed_s = (self.budget.share or 0.0) * self._step_s
        if not (allowed_s and self._launch_s):
            return 1
        return max(1, min(math.ceil(self._launch_s / (self.LAUNCH_SHARE * allowed_s)), self.MOST_FORWARDS))

    def scrub_bytes(self, forwards: int) -> int:
        """Bytes that a scrub may read which serves so many ``forwards``."""
        if self.budget.share is None:
            return self.budget.step_bytes * forwards
        return int(max(self.budget.share * self._step_s * forwards - self._launch_s, 0.0) * self._bytes_per_s)

    def achieved(self, scrub_bytes: int, forwards: int, pool_bytes: int) -> dict[str, float]:
        """What scrubs of ``scrub_bytes`` after every so many ``forwards`` come to: ``scrub_share`` of the time, and
        ``scrub_period_s``, how long one round of ``pool_bytes`` takes. Empty until a forward's length is known."""
        if not (scrub_bytes and self._step_s and self._bytes_per_s):
            return {}
        between_s = forwards * self._step_s
        return {
            "scrub_share": (scrub_bytes / self._bytes_per_s + self._launch_s) / between_s,
            "scrub_period_s": pool_bytes / scrub_bytes * between_s,
        }
