"""Begins to guard a pool, or reports why not: called by a plugin once the engine's pool exists."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import pluggy
import torch

from canary_core.config import CanaryConfig
from canary_core.errors import AttachError
from canary_core.events import Event
from canary_core.guard.coverage import Coverage
from canary_core.ops.state import RegionState
from canary_core.place import Place
from canary_core.region import Region, Uncovered
from canary_core.runtime.telling import emit

Guarded = TypeVar("Guarded")


class Closable(Protocol):
    """A `Canary`, as far as `attach` needs it."""

    def close(self) -> None:
        """Stops for good."""


@dataclass(frozen=True, slots=True)
class _Attaching:
    """The running `attach`: its settings, and the Canaries made in it."""

    config: CanaryConfig
    canaries: list[Closable] = field(default_factory=list)


_attaching: "ContextVar[_Attaching | None]" = ContextVar("_attaching", default=None)


def made(canary: Closable) -> None:
    """Within `attach`: ``canary`` is closed if what is made around it fails."""
    attaching = _attaching.get()
    if attaching is not None:
        attaching.canaries.append(canary)


def attached(config: CanaryConfig, backend: str, regions: Collection[Region], states: Collection[RegionState]) -> Event:
    """The ``attached`` event: what is guarded, how, and the memory that it takes, in bytes."""
    fields: dict[str, object] = {
        "backend": backend,
        "mode": config.mode,
        "bytes": config.bytes,
        "layers": str(config.layers),
        **_keys(config, states),
        "regions": {r.name: {"kind": r.kind.value, "slots": r.slots, "sources": len(r.sources)} for r in regions},
        "memory_bytes": sum(state.memory_bytes for state in states),
        "pool_bytes": sum(region.pool_bytes for region in regions),
    }
    return Event("attached", "warning" if config.key_file and "keys_reason" in fields else "info", fields)


def _keys(config: CanaryConfig, states: Collection[RegionState]) -> dict[str, object]:
    """Sort of the fingerprints' keys, and why it is no better one."""
    from canary_core.ops.fingerprint_keys import keys_reason

    kind = next((state.sources.fingerprint_keys.kind for state in states if state.sources), None)
    if kind is None:
        return {}
    reason = keys_reason(config)
    return {"keys": kind, **({"keys_reason": reason} if reason else {})}


def attach(
    where: str, config: CanaryConfig, build: Callable[[], Guarded | None], hooks: pluggy.PluginManager | None = None
) -> Guarded | None:
    """Returns the result of ``build``: the plugin's own object around a `Canary`, or None where there is nothing to
    guard, reported by `report_unguarded`. In log mode an exception of ``build`` becomes a ``disabled`` event with
    ``where`` (as in `Canary.fail`), and None: the engine goes on unguarded. In raise mode the exception passes.
    ``hooks``: receivers of the event, this process's plugins by default."""
    attaching = _Attaching(config)
    begun = _attaching.set(attaching)
    try:
        return build()
    except Exception as error:
        for canary in attaching.canaries:
            # Nobody calls it for a forward, so it must not count as a guard.
            with suppress(Exception):
                canary.close()
        if config.mode == "raise":
            raise
        fields: dict[str, object] = {**_place(config), "where": where, "error": str(error)}
        if isinstance(error, AttachError):
            fields["reason"] = f"the adapter described what can't be: {error}"
        emit(Event("disabled", "error", fields), hooks)
        return None
    finally:
        _attaching.reset(begun)


def report_unguarded(
    items: Sequence[Uncovered], model: str | None = None, hooks: pluggy.PluginManager | None = None
) -> None:
    """Reports a pool as not guarded at all: a ``coverage`` event with ``items``, the reasons, and no region. ``model``:
    as `CanaryConfig.model`. ``hooks``: receivers of the event, this process's plugins by default. Within `attach` the
    event names the pool's place."""
    event, attaching = Coverage((), tuple(items)).event(), _attaching.get()
    place = {} if attaching is None else _place(attaching.config)
    draft = {"model": model, "draft": True} if model else {}
    emit(replace(event, fields={**place, **draft, **event.fields}), hooks)


def _place(config: CanaryConfig) -> dict[str, object]:
    """Place of a pool, without the GPU: the place of its memory is unknown."""
    return Place.of(config, torch.device("cpu")).fields()
