"""A plugin of Canary's for `guard.py`: keeps all that Canary tells in this process, to be asked for over vLLM's RPC."""

from typing import Any

from canary_core import hookimpl

VIOLATIONS: list[dict[str, Any]] = []
EVENTS: list[dict[str, Any]] = []
OBJECTS: list[Any] = []
"""The violations themselves."""
INJECTORS: list[Any] = []
"""The fault injector that is registered just now."""


@hookimpl
def canary_violation(violation: Any) -> None:
    """A finding."""
    OBJECTS.append(violation)
    VIOLATIONS.append({k: v for k, v in violation.fields().items() if isinstance(v, (int, str, float))})


@hookimpl
def canary_event(event: Any) -> None:
    """All else."""
    EVENTS.append({"event": event.name, "level": event.level, **{k: str(v)[:400] for k, v in event.fields.items()}})
