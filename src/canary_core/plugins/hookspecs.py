"""The hooks: all that a plugin can do. A plugin implements any of them, marked with `hookimpl`.

None runs inside a CUDA graph capture, except `canary_pre_forward`, `canary_post_forward` and `canary_recorded`,
which do when the forward they belong to is captured; there they must neither read from the device nor allocate.

A plugin's function takes those of a hook's arguments that it needs, by name. So a hook may gain arguments without
breaking a plugin, and does so without another `PROTOCOL`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable

    from canary_core.batch import BatchView
    from canary_core.config import CanaryConfig
    from canary_core.events import Event
    from canary_core.guard.canary import Canary
    from canary_core.incident import Incident
    from canary_core.plugins import EngineInfo, HookTarget
    from canary_core.violation import Violation

PROTOCOL = 1
"""The number of these hooks and of the interfaces behind them. A plugin says for which it was written in
``CANARY_PROTOCOL``, an attribute of the object that its entry point names; none counts as 1. It grows when a plugin
that worked would not any more, and then plugins of another number are refused."""

hookspec = pluggy.HookspecMarker("canary")
hookimpl = pluggy.HookimplMarker("canary")


@hookspec
def canary_engine() -> "EngineInfo":
    """Which engine the plugin is for, its installed version and the supported range. Called by ``canary plugins`` and
    before `canary_install`; must not import the engine."""


@hookspec
def canary_targets() -> "Sequence[HookTarget | str]":
    """The functions of the engine that the plugin hooks in every process, by full dotted name, as `HookTarget` with the
    parameters that it relies on. Called right before `canary_install`, once the engine's version was found fit, so it
    may import the engine. Where one is missing or has other parameters, the plugin is refused with a sentence that
    names each, and `canary_install` is not called. Functions that only some engines use are for the plugin to check
    when it hooks them: `HookTarget.problem`."""


@hookspec
def canary_configure(config: "CanaryConfig", manager: "pluggy.PluginManager") -> None:
    """Settings are about to be used: take over what you need of them. Called of each plugin when it is loaded and again
    whenever plugins are loaded, the built-in ones first; and of all plugins in ``manager`` before a `Canary` that is
    not off begins. So it is called several times, also with different settings, and never in a forward.

    A plugin may register others in ``manager``, where they are not there yet: so built-in faults bring their injector.
    Built-in reporting takes format and level. An exception refuses a plugin that is loaded, and reaches whoever builds
    a `Canary`."""


@hookspec
def canary_install(config: "CanaryConfig") -> None:
    """Hook the engine, once per process, after all plugins are loaded, the engine's version was found fit and all of
    `canary_targets` were found. Twice must be harmless. The plugin builds a `Canary` when the engine's pool exists,
    with these settings: with an engine that is newer than tested they ask for an audit
    (`CanaryConfig.untested_engine`)."""


@hookspec
def canary_uninstall() -> None:
    """Undo `canary_install`."""


@hookspec
def canary_attached(canary: "Canary") -> None:
    """A `Canary` was built on a pool. Called once per pool, before its first forward."""


@hookspec
def canary_pre_forward(canary: "Canary", batch: "BatchView") -> None:
    """Before each forward, before Canary's own check, on the engine's stream; every plugin, last registered first."""


@hookspec
def canary_post_forward(canary: "Canary", batch: "BatchView") -> None:
    """After each forward, before Canary records it, on the engine's stream; every plugin, last registered first."""


@hookspec
def canary_recorded(canary: "Canary", batch: "BatchView") -> None:
    """After each forward, once Canary has recorded and scrubbed, on the engine's stream; every plugin, last registered
    first."""


@hookspec
def canary_detached(canary: "Canary") -> None:
    """A `Canary` was closed: its last findings are reported and no forward of it will be checked again. Called once."""


@hookspec(firstresult=True)
def canary_dismiss(violation: "Violation") -> str | None:
    """May dismiss a finding that the engine explains, e.g. a write that looks lost because two tokens have the same
    embedding: return the reason, which is counted and shown in debug output. Called on the host, late."""


@hookspec
def canary_violation(violation: "Violation") -> None:
    """A finding that nobody dismissed. Called on the host, some steps after the check that found it."""


@hookspec
def canary_incident(canary: "Canary", incident: "Incident") -> None:
    """Findings of one cause, once for each incident that is told: after `canary_violation` of all its findings so far,
    before its ``incident`` event. It goes on growing while more of its consequences are found. Called on the host."""


@hookspec
def canary_settle(canary: "Canary", last: bool) -> None:
    """Wait, for some seconds at most, until what is being done about incidents of ``canary`` on threads of yours is
    done: a finding is about to stop the engine, or `Canary.drain` was called. ``last``: no more incidents will come, so
    end the threads."""


@hookspec(firstresult=True)
def canary_probe(canary: "Canary", passed: "Callable[[], None]") -> bool | None:
    """A probe of the alarm has come as far as its incident. Call ``passed`` where an incident would have come, on a
    thread of yours if that is there, and return True; or return None, if you do nothing about incidents now. Built-in
    diagnosis answers; a plugin that takes its place should, too."""


@hookspec
def canary_event(event: "Event") -> None:
    """Everything else worth telling: start, coverage, stats, silence, errors of ours. Called on the host; a
    ``diagnosis``, and what goes wrong with it, on a thread of Canary's own."""


@hookspec
def canary_demo() -> object:
    """A `canary_core.testing.DemoEngine`, which ``canary demo`` can run: builds tiny models, serves traffic, injects
    faults."""


@hookspec
def canary_conformance() -> type:
    """The conformance suite of the plugin's engine, a subclass of `canary_core.testing.PluginConformance`, which
    ``canary check-plugin`` runs. May import the engine, which is imported in no other way before `canary_install`.
    Raises `PluginError`, saying how to run the suite, where it can't run wherever the engine is installed."""
