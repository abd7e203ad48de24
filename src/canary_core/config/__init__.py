"""Every setting: its values, its current value, and its table for users."""

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
