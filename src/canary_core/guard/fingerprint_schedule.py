"""`FingerprintSchedule`: decides which forwards of a region are fingerprinted."""

from canary_core.batch import BatchView
from canary_core.config import CanaryConfig
from canary_core.region import Region, RegionKind


class FingerprintSchedule:
    """For one region: every ``interval``-th forward, every forward but decodes, and every captured one.

    A fingerprinted forward has the bytes of its writes fingerprinted. Bytes are compared before a fingerprinted forward
    and before the next one: before others, nearly nothing to read has a known fingerprint.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.always = interval == 1
        """Whether every forward is fingerprinted."""
        self._forwards = 0
        self.now = True
        """Whether the last begun forward is fingerprinted."""

    @classmethod
    def of(cls, region: Region, config: CanaryConfig) -> "FingerprintSchedule":
        """``CANARY_STATE_INTERVAL`` for recurrent states, rewritten whole by each forward; each forward for all
        others."""
        return cls(config.state_interval if region.kind is RegionKind.STATE else 1)

    def begin(self, batch: BatchView, captured: bool) -> bool:
        """Begins a forward of ``batch``; returns whether to compare the bytes it reads. ``captured``: a graph replays
        the launches, or did at some time, so the host can't know the forward's number. Host only."""
        self._forwards += 1
        last = self.now
        self.now = captured or batch.tokens > batch.rows or self._forwards % self._interval == 0
        return last or self.now
