"""`hits_unchecked`: whether bytes of prefix hits can be compared, in the words of all engines."""

from canary_core import CanaryConfig, Event


def hits_unchecked(config: CanaryConfig, why_not: str | None = None) -> Event | None:
    """The event where ``CANARY_HIT_CHECK`` is on, and no bytes of prefix hits can be compared; else None. ``why_not``:
    the engine's own reason."""
    reason = "CANARY_BYTES=off: no bytes are known" if config.bytes == "off" else why_not
    return Event("hits_unchecked", "error", {"reason": reason}) if config.hit_check and reason is not None else None
