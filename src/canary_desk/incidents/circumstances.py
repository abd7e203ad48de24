"""`Circumstances`: facts for a bundle about the `Canary` of an incident."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from canary_core.config import CanaryConfig
from canary_core.config.shown import settings
from canary_core.events import Event
from canary_core.guard.canary import Canary

PRIVATE = ("CANARY_INCIDENT_DIR", "CANARY_SUPPRESSIONS", "CANARY_NOTIFY", "CANARY_NOTIFY_KEY_FILE", "CANARY_KEY_FILE")
"""Settings that stay out of bundles and dumps: paths and addresses say nothing there, and may say who runs the engine,
or hold a secret."""


def shown_settings(config: CanaryConfig) -> dict[str, str]:
    """All others, by variable."""
    return {s.variable: s.value for s in settings(config) if s.variable not in PRIVATE}


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Facts at the time of an incident. ``about``: time, settings, coverage, counters and regions, as plain values.
    ``events``: earlier events, each with its time. ``tokens``, ``content``: whether token ids, and the bytes of the
    slots, may be kept."""

    about: Mapping[str, object]
    events: Sequence[tuple[float, Event]]
    tokens: bool
    content: bool

    @classmethod
    def of(cls, canary: Canary) -> "Circumstances":
        """The present ones."""
        about = {
            "settings": shown_settings(canary.config),
            "coverage": canary.coverage.event().fields,
            "told": round(time.time(), 3),
            "forwards": canary.forwards,
            "stats": {**canary.stats(), **canary.scrub_stats()},
            "backend": canary.backend,
            "device": canary.device.type,
            "host": canary.place.host,
            "pid": canary.place.pid,
            "gpu": canary.place.gpu,
            "pci": canary.place.pci,
            "replica": canary.place.replica,
            "rank": canary.config.rank,
            "ranks": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
            "model": canary.place.model,
        }
        return cls(about, canary.recent_events, canary.config.incident_tokens, canary.config.incident_bytes)
