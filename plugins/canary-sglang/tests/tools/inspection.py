"""What a guarded engine tells, and what is to be known of it."""

import json
from typing import Any

from engines import fake_compressors

from canary_core.events import Event
from canary_core.plugins.hookspecs import hookimpl
from canary_core.violation import Violation


class Findings:
    """A plugin that keeps what the Canaries of a process found and told."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.events: list[Event] = []

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        self.violations.append(violation)

    @hookimpl
    def canary_event(self, event: Event) -> None:
        self.events.append(event)


def findings(engine: Any) -> dict[str, Any]:
    """What was found since the last call, after everything was waited for."""
    session = engine.session
    for canary in engine.canaries:
        canary.drain()
    found, engine.told.violations = engine.told.violations, []
    return {
        "violations": [v.fields() for v in found],
        "stats": session.canary.stats() if session is not None else {},
        "drafts": {c.config.model: c.stats() for c in engine.canaries if c.config.model},
    }


def events(engine: Any) -> list[dict[str, Any]]:
    """What was told beside findings, since the start."""
    return [
        {"name": e.name, "level": e.level, **json.loads(json.dumps(e.fields, default=str))} for e in engine.told.events
    ]


def regions(engine: Any) -> dict[str, Any]:
    """Guarded regions: kind, slots, window, sources."""
    return {
        r.name: {
            "kind": r.kind.value,
            "slots": r.slots,
            "window": r.window_tokens,
            "sources": [s.name for s in r.sources],
        }
        for canary in engine.canaries
        for r in canary.regions.values()
    }


def arrivals(engine: Any) -> dict[str, int]:
    """What came to the pool without a forward, and what left it."""
    return {
        name: count
        for way in engine.session.canary.step.listeners
        for name, count in getattr(way, "counts", {}).items()
    }


def table_names(engine: Any) -> list[str]:
    """The tables of attention backends that were compared so far."""
    return list(engine.session.canary.step.tables.names)


def evictable(engine: Any) -> int:
    """Tokens that only the prefix cache holds."""
    size = engine.scheduler.tree_cache.evictable_size()
    return int(size)


def compressed(engine: Any) -> dict[str, int]:
    """What the compressors of DeepSeek-V4 read of their rings since the start."""
    return fake_compressors.READ


def pool(engine: Any) -> str:
    """Class of the engine's pool."""
    return type(engine.runner.token_to_kv_pool).__name__
