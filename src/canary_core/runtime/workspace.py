"""`Workspace`: the device memory and ops of one `Canary`; `Switch`: its on and off, with the reasons."""

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pluggy
import torch

from canary_core.config import CanaryConfig
from canary_core.errors import AttachError, MisuseError, ViolationError
from canary_core.events import Event
from canary_core.ops import backends
from canary_core.ops.backends import Backend
from canary_core.ops.state import RegionState, Shared
from canary_core.place import Place
from canary_core.region import Region
from canary_core.runtime.event_queue import EventQueue
from canary_core.runtime.journal import Journal
from canary_core.runtime.memory_proof import MemoryProof
from canary_core.runtime.telling import emit

if TYPE_CHECKING:
    from canary_core.runtime.side_stream import SideStream

RECENT = 256
"""Events kept."""

MOST_SORTS = 256
"""Most sorts of misuse reported; more say nothing new."""


NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """The settings, the memory of each region by name, memory common to the regions, the ops, events waiting for the
    next forward, the side stream (None on a CPU), the proof of the engine's memory, and the last events of slots.
    Without states in off mode."""

    config: CanaryConfig
    device: torch.device
    shared: Shared
    states: dict[str, RegionState]
    backend: Backend
    queue: EventQueue
    side: "SideStream | None"
    proof: MemoryProof
    journal: Journal

    @classmethod
    def allocate(cls, regions: Sequence[Region], config: CanaryConfig) -> "Workspace":
        """All device memory for ``regions``. Raises `ConfigError` where the back end can't run."""
        device = regions[0].device
        backend = backends.choose(config.backend, device)
        shared = Shared.allocate(config, device, len(regions))
        states = {r.name: RegionState(r, i, shared, config) for i, r in enumerate(regions)}
        side = None
        if device.type == "cuda":
            from canary_core.runtime import side_stream

            side = side_stream.SideStream(device)
        proof = MemoryProof(states, device)
        return cls(config, device, shared, states, backend, EventQueue(device), side, proof, Journal())

    @classmethod
    def off(cls, config: CanaryConfig, device: torch.device) -> "Workspace":
        """Nothing is allocated on ``device``."""
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        shared = Shared(empty, empty, empty)
        proof = MemoryProof({}, torch.device("cpu"))
        return cls(config, device, shared, {}, backends.torch_backend(), EventQueue(device), None, proof, Journal())

    def join(self, for_good: bool = False) -> None:
        """The current stream waits for work beside the forwards, if any: before slots, records, or tensors of the last
        forward's view change. ``for_good``: the current stream is the forwards'."""
        if self.side is not None:
            self.side.join(for_good)

    def beside(self, wanted: bool) -> AbstractContextManager[None]:
        """Context: with ``wanted``, work issued within runs on the side stream, if the device has one."""
        return self.side if wanted and self.side is not None else NOTHING


class Switch:
    """Whether a Canary is on. Receives exceptions of Canary's own: in log mode the first one switches Canary off for
    good, loudly, and the engine goes on, but where the device has no memory left: then forwards pass by for a while. In
    raise mode exceptions are raised."""

    def __init__(self, workspace: Workspace, hooks: pluggy.PluginManager) -> None:
        config = workspace.config
        self.enabled = config.mode != "off"
        self.raises = config.mode == "raise"
        """Whether exceptions and findings reach the engine."""
        self.on_probation = config.untested_engine
        """Whether the engine is newer than its plugin was tested with."""
        self.place = Place.of(config, workspace.device)
        self._about = self.place.fields()
        self.hooks = hooks
        self._workspace = workspace
        self._misused: set[object] = set()
        self.guard: Callable[[str], Failsafe] = _Guards(self).__getitem__
        """A context for work of ours within the engine, by its name: exceptions go to `fail`, findings pass through."""
        self.recent: deque[tuple[float, Event]] = deque(maxlen=RECENT)
        """The last reported events, each with its time, in seconds since the epoch."""
        self.put_off: Callable[[], None] | None = None
        """A pending warm-up. Every public call runs it before it touches the device. None: nothing is pending."""
        self.rest: Callable[[], float | None] = lambda: None
        """Lets forwards pass by for some seconds, and returns these; None where that can't be done."""
        self._resting = False
        self.misuses = 0
        """Number of impossible calls of Canary."""
        self.misuses_untold = 0
        """Of these, the number of a new sort beyond `MOST_SORTS`."""

    def tell(self, event: Event) -> None:
        """Passes ``event`` to every plugin, with the Canary's `Place`."""
        self.emit(replace(event, fields={**self._about, **event.fields}))

    def emit(self, event: Event) -> None:
        """As `tell`, with nothing added."""
        self.recent.append((time.time(), event))
        emit(event, self.hooks)

    def call(self, hook: str, failed: Any = None, **given: object) -> Any:
        """The answer of the plugins to ``hook``; ``failed`` where one of them raises, with a ``reporting_failed``
        event."""
        try:
            return getattr(self.hooks.hook, hook)(**given)
        except Exception as error:
            self.emit(Event("reporting_failed", "error", {"where": hook, "error": repr(error)}))
            return failed

    def fail(self, where: str, error: Exception) -> None:
        """Handles an exception of Canary's own, raised in ``where``."""
        if self.raises:
            raise error
        if isinstance(error, torch.OutOfMemoryError) and self._rested(where, error):
            return
        trace = "".join(traceback.format_exception(error))
        fields: dict[str, object] = {"where": where, "error": repr(error), "traceback": trace}
        if isinstance(error, AttachError):
            fields["reason"] = f"the adapter described what can't be, in {where}: {error}"
        self._disable(fields)

    def _rested(self, where: str, error: Exception) -> bool:
        """Whether forwards pass by for a while. What fails meanwhile, switches off."""
        if self._resting or not self.enabled:
            return False
        self._resting = True
        try:
            seconds = self.rest()
        except Exception:
            return False
        finally:
            self._resting = False
        if seconds is None or not self.enabled:
            return False
        self.tell(Event("out_of_memory", "error", {"where": where, "again_s": seconds, "error": str(error)}))
        return True

    def audit_failed(self, problems: Sequence[str]) -> None:
        """Acts on ``problems`` of the audit, sentences about the adapter, already reported; without any, nothing
        happens. Raises `AttachError` in raise mode. In log mode, where the engine is newer than its plugin was tested
        with, switches off for good with a ``disabled`` event: the adapter may describe the engine wrongly. With a
        tested engine Canary goes on. Called between forwards, not in a capture."""
        if not problems or not self.enabled:
            return
        found = "; ".join(problems)
        if self.raises:
            raise AttachError(f"the audit of the first forwards failed: {found}")
        if self.on_probation:
            error = (
                f"the engine is newer than its plugin was tested with, and the audit of the first forwards failed: "
                f"{found}; install a tested release of the engine, or a release of the plugin that supports this one"
            )
            self._disable({"where": "audit", "error": error})

    def audit_skipped(self, reasons: Sequence[str]) -> None:
        """The audit that an engine on probation needs could not be made, because of ``reasons``, and has told so.
        Raises `AttachError` in raise mode; in log mode Canary goes on. Called between forwards, not in a capture."""
        if reasons and self.enabled and self.raises:
            raise AttachError(
                "the engine is newer than its plugin was tested with, and the audit of its first forwards could not be "
                f"made: {'; '.join(reasons)}; install a tested release of the engine, or use CANARY_MODE=log"
            )

    def _disable(self, fields: dict[str, object]) -> None:
        """Off for good, with a ``disabled`` event."""
        self.enabled = False
        # Our tensors may be given up now. A device that is lost is the engine's to tell.
        with contextlib.suppress(Exception):
            self._workspace.join(for_good=True)
        self.tell(Event("disabled", "error", fields))

    def misuse(self, what: str, sort: object = None) -> None:
        """Canary was called in a way that can't be right; ``what`` says so in a sentence, told once for each ``sort``
        (None: for each sentence), of `MOST_SORTS` sorts. Raises `MisuseError` in raise mode."""
        self.misuses += 1
        if self.raises:
            raise MisuseError(what)
        sort = sort or what
        if sort not in self._misused and len(self._misused) >= MOST_SORTS:
            self.misuses_untold += 1
        elif sort not in self._misused:
            self._misused.add(sort)
            self.tell(Event("misuse", "error", {"reason": what}))


class _Guards(dict[str, "Failsafe"]):
    """Made on first use. Each forward has a dozen, and a look at a dict is no call of Python's."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def __missing__(self, where: str) -> "Failsafe":
        found = self[where] = Failsafe(self._switch, where)
        return found


class Failsafe:
    """See `Switch.guard`."""

    __slots__ = ("_switch", "_where")

    def __init__(self, switch: Switch, where: str) -> None:
        self._switch = switch
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, ViolationError) or not isinstance(error, Exception):
            return False
        self._switch.fail(self._where, error)
        return True
