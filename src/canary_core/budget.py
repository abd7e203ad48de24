"""How much the scrub does after each forward: a share of time, or bytes."""

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
    """Turns a `ScrubBudget` into bytes per step: a share needs the step's length (on the host's clock) and the scrub's
    speed (measured once, at attach).

    A step counts as long as the last one, at most as the last ones on average: after a long prefill, decode steps don't
    pay for its length.
    """

    WEIGHT = 0.05
    """Weight of the newest step in the average."""

    def __init__(self, budget: ScrubBudget, bytes_per_s: float) -> None:
        self._budget = budget
        self._bytes_per_s = bytes_per_s
        self._last: float | None = None
        self._average_s = 0.0
        self._step_s = 0.0

    @property
    def off(self) -> bool:
        """Whether there is never anything to scrub."""
        return not self._budget.share and not self._budget.step_bytes

    def step(self) -> None:
        """A step ended now. A pause of over a second is the engine idling, not a step."""
        now = time.perf_counter()
        if self._last is not None and now - self._last < 1.0:
            took = now - self._last
            self._average_s += (took - self._average_s) * (self.WEIGHT if self._average_s else 1.0)
            self._step_s = min(took, self._average_s)
        self._last = now

    def pause(self) -> None:
        """The engine idles: the time until the next step is none."""
        self._last = None

    @property
    def step_bytes(self) -> int:
        """Bytes the next scrub may read."""
        if self._budget.share is None:
            return self._budget.step_bytes
        return int(self._budget.share * self._step_s * self._bytes_per_s)

    def achieved(self, step_bytes: int, pool_bytes: int) -> dict[str, float]:
        """What a scrub of ``step_bytes`` a step comes to: ``scrub_share`` of the time (at the speed measured at
        attach), and ``scrub_period_s``, how long one round of ``pool_bytes`` takes. Empty until a step's length is
        known."""
        if not (step_bytes and self._step_s and self._bytes_per_s):
            return {}
        return {
            "scrub_share": step_bytes / self._bytes_per_s / self._step_s,
            "scrub_period_s": pool_bytes / step_bytes * self._step_s,
        }
