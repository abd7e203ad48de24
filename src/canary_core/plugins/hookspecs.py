"""The hooks: everything a plugin can do. A plugin implements any of them, marked with `hookimpl`.

No hook runs inside a CUDA graph capture, except `canary_pre_forward`, `canary_post_forward` and `canary_recorded` when
their forward is captured; there they must neither read from the device nor allocate.

A plugin's function names the arguments it needs, in any order. So a hook may gain arguments without breaking a plugin,
under the same `PROTOCOL`.
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
    from canary_core.verdict import Verdict
    from canary_core.violation import Violation

PROTOCOL = 1
"""Version of these hooks and of the interfaces behind them. A plugin declares its version in ``CANARY_PROTOCOL``, an
attribute of the object named by the entry point; none counts as 1. The number grows with a change that would break a
working plugin; plugins of another number are refused."""

hookspec = pluggy.HookspecMarker("canary")
hookimpl = pluggy.HookimplMarker("canary")


@hookspec
def canary_engine() -> "EngineInfo":
    """The plugin's engine, its installed version and the supported range. Called by ``canary plugins`` and before
    `canary_install`; must not import the engine."""


@hookspec
def canary_targets() -> "Sequence[HookTarget | str]":
    """Functions of the engine hooked by the plugin in every process, by full dotted name, as `HookTarget` with the
    parameters the plugin relies on. Called right before `canary_install`, after the check of the engine's version; may
    import the engine. If a function is missing or has other parameters, the plugin is refused with a sentence for each,
    and `canary_install` is not called. A function used by some engines only is for the plugin to check on hooking:
    `HookTarget.problem`."""


@hookspec
def canary_configure(config: "CanaryConfig", manager: "pluggy.PluginManager") -> None:
    """Take over settings before use. Called on each plugin when it is loaded and again whenever plugins are loaded, the
    built-in ones first; and on all plugins in ``manager`` before the start of a `Canary` that is not off. So expect
    several calls, also with different settings, and none in a forward.

    A plugin may register others in ``manager``, if not yet registered: built-in faults bring their injector so.
    Built-in reporting takes format and level. An exception refuses a plugin during loading, and otherwise reaches the
    caller building a `Canary`.
    """


@hookspec
def canary_install(config: "CanaryConfig") -> None:
    """Hook the engine, once per process, after all plugins are loaded, the engine's version was accepted and all of
    `canary_targets` were found. A second call must be harmless. The plugin builds a `Canary` with these settings when
    the engine's pool exists: for an engine newer than tested, the settings ask for an audit
    (`CanaryConfig.untested_engine`)."""


@hookspec
def canary_uninstall() -> None:
    """Undo `canary_install`."""


@hookspec
def canary_attached(canary: "Canary") -> None:
    """A `Canary` was built on a pool. Called once per pool, before the first forward."""


@hookspec
def canary_pre_forward(canary: "Canary", batch: "BatchView") -> None:
    """Before each forward, before Canary's own check, on the engine's stream; every plugin, last registered first."""


@hookspec
def canary_post_forward(canary: "Canary", batch: "BatchView") -> None:
    """After each forward, before Canary records the new slots, on the engine's stream; every plugin, last registered
    first."""


@hookspec
def canary_recorded(canary: "Canary", batch: "BatchView") -> None:
    """After each forward, once Canary has recorded and scrubbed, on the engine's stream; every plugin, last registered
    first."""


@hookspec
def canary_detached(canary: "Canary") -> None:
    """A `Canary` was closed: the last findings are reported, and no forward will be checked again. Called once."""


@hookspec(firstresult=True)
def canary_dismiss(violation: "Violation") -> str | None:
    """Dismiss a finding with an innocent explanation in the engine, e.g. a write that looks lost because two tokens
    have the same embedding: return the reason, to be counted and shown in debug output. Called on the host, late."""


@hookspec
def canary_violation(violation: "Violation") -> None:
    """A finding, not dismissed. Called on the host, some steps after the check."""


@hookspec
def canary_verdict(verdict: "Verdict") -> None:
    """KV that may not be served, by a finding that was not dismissed: also by one that is repeated, or that the limits
    of telling leave out, before `canary_violation`. Called on the host, at the end of the step in which the finding was
    read; never with ``CANARY_ON_VIOLATION=report``."""


@hookspec
def canary_incident(canary: "Canary", incident: "Incident") -> None:
    """Findings of one cause, once for each told incident: after `canary_violation` of all findings so far, before the
    ``incident`` event. The incident grows on with later consequences. Called on the host."""


@hookspec
def canary_settle(canary: "Canary", last: bool) -> None:
    """Wait, for some seconds at most, until what is being done about incidents of ``canary`` on threads of yours is
    done: a finding is about to stop the engine, or `Canary.drain` was called. ``last``: no more incidents will come, so
    end the threads."""


@hookspec
def canary_suspect(request: str, reason: str) -> None:
    """The KV of a running request is suspected, by a plugin that has seen NaN logits or a service with a complaint:
    `canary_core.suspect` calls this, on any thread. Built-in control has the request computed again by each Canary of
    the process with a verifier, and tells the verdict in a ``verified`` event. Never waits."""


@hookspec(firstresult=True)
def canary_probe(canary: "Canary", passed: "Callable[[], None]") -> bool | None:
    """A probe of the alarm has arrived at the place of its incident. Call ``passed`` where an incident would arrive, on
    your own thread if there is one, and return True; or return None, if you ignore incidents at present. Built-in
    diagnosis answers; a plugin in its place should, too."""


@hookspec
def canary_event(event: "Event") -> None:
    """Every other event: start, coverage, stats, silence, errors of Canary's own. Called on the host; a ``diagnosis``,
    or its failure, on a thread of Canary's own."""


@hookspec
def canary_demo() -> object:
    """A `canary_core.testing.DemoEngine` for ``canary demo``: builds tiny models, serves traffic, injects faults."""


@hookspec
def canary_conformance() -> type:
    """The conformance suite of the plugin's engine, a subclass of `canary_core.testing.PluginConformance`, run by
    ``canary check-plugin``. May import the engine; nothing else does before `canary_install`. Raises `PluginError` with
    the way to run the suite, if it can't run wherever the engine is installed."""
