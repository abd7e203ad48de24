"""Settings for tests and demos: the defaults, whatever the environment says, and stricter ones."""

from typing import Any

from canary_core.config import CanaryConfig


def default_config(**overrides: Any) -> CanaryConfig:
    """The defaults with public keys, without stats and without the alarm for silence, whatever the environment says."""
    defaults = {name: f.default for name, f in CanaryConfig.model_fields.items()}
    # The same numbers for the same seed: with keys of the process's own no two runs would have the same.
    return CanaryConfig.load(**{**defaults, "keys": "public", "stats_interval": 0, "silence_s": 0.0, **overrides})


def strict_config(**overrides: Any) -> CanaryConfig:
    """Settings that compare all bytes read by a forward, and after each forward the whole of a small pool."""
    return default_config(**{"read_check": -1, "scrub_budget": "1GiB", **overrides})
