"""`FingerprintSchedule`: decides which forwards of a region are fingerprinted."""

from canary_core.batch import BatchView
from canary_core.config import CanaryConfig
from canary_core.region import Region, RegionKind


class FingerprintSchedule:
    """Of one region: every ``interval``-th forward, all that are no decodes, and all that are captured in a graph.

    A forward is fingerprinted when the bytes that it wrote are. Bytes are compared before a forward that will be
    fingerprinted and before the one after it: before others, nearly nothing that is read has a known fingerprint.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.always = interval == 1
        """Whether every forward is fingerprinted."""
        self._forwards = 0
        self.now = True
        """Whether the forward that began last is fingerprinted."""

    @classmethod
    def of(cls, region: Region, config: CanaryConfig) -> "FingerprintSchedule":
        """``CANARY_STATE_INTERVAL`` for recurrent states, all of whose bytes each forward rewrites; each forward for
        all others."""
        return cls(config.state_interval if region.kind is RegionKind.STATE else 1)

    def begin(self, batch: BatchView, captured: bool) -> bool:
        """Host only. A forward of ``batch`` begins; whether to compare what it reads. ``captured``: a graph replays
        what is launched now, or did at some time, so the host does not know which forward it will be."""
        self._forwards += 1
        last = self.now
        self.now = captured or batch.tokens > batch.rows or self._forwards % self._interval == 0
        return last or self.now
