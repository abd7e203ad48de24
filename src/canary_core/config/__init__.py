"""Settings: `CanaryConfig` and its values; `shown` has their table for users."""

from canary_core.config.config import CanaryConfig, LogFormat, LogLevel, Mode
from canary_core.config.values import LayerShare, ListenAddress, ScrubBudget, Untested

__all__ = ["CanaryConfig", "LayerShare", "ListenAddress", "LogFormat", "LogLevel", "Mode", "ScrubBudget", "Untested"]
