"""Every setting: what it may be, what it is, and how users are shown it."""

from canary_core.config.config import CanaryConfig, LogFormat, LogLevel, Mode, Untested
from canary_core.config.shown import Setting, settings, shares_metrics, unknown_variables, variable_of_others
from canary_core.config.values import ListenAddress, ScrubBudget

__all__ = [
    "CanaryConfig",
    "ListenAddress",
    "LogFormat",
    "LogLevel",
    "Mode",
    "ScrubBudget",
    "Setting",
    "Untested",
    "settings",
    "shares_metrics",
    "unknown_variables",
    "variable_of_others",
]
