"""Effects of the control socket's commands on the Canaries of this process."""

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from canary_core.config import ScrubBudget
from canary_core.errors import CanaryError, error_text
from canary_core.installed import versions
from canary_desk.control.messages import CHANGES, MOST_REPLY_BYTES, Reply, Request
from canary_desk.control.verifications import Verifications
from canary_desk.incidents.circumstances import shown_settings
from canary_desk.incidents.suppressions import acknowledge
from canary_desk.metrics.readings import Readings, age_s

if TYPE_CHECKING:
    from canary_core.guard.canary import Canary

DUMP_BYTES = MOST_REPLY_BYTES // 2
"""Most bytes of the events of a dump; the oldest are left out."""


class Commands:
    """Answers requests about the Canaries of ``readings``. Called from the thread of the socket: reads facts known to
    the host and sets values read later by the engine's own thread; never touches a device.

    ``writable``: whether commands that change something are carried out.
    """

    def __init__(self, readings: Readings, writable: bool) -> None:
        self._readings = readings
        self.writable = writable
        self._verifications = Verifications()
        self._started = time.time()

    def answer(self, request: Request) -> Reply:
        """Never raises."""
        if request.command in CHANGES and not self.writable:
            return Reply(
                error=f"{request.command} acts on the engine, and this socket only answers questions; start the engine "
                "with CANARY_CONTROL=write"
            )
        self._verifications.sweep()
        canaries = self._readings.running()
        try:
            return Reply(result=_COMMANDS[request.command](self, canaries, request))
        except CanaryError as error:
            return Reply(error=str(error))
        except Exception as error:  # what the engine's thread is just changing
            return Reply(error=f"{request.command} failed ({error_text(error)}); try again")

    def _status(self, canaries: "Sequence[Canary]", request: Request) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "host": platform.node(),
            "program": " ".join(sys.argv[:1]),
            "uptime_s": round(time.time() - self._started, 1),
            "writable": self.writable,
            "canaries": [status(canary) for canary in canaries],
        }

    def _dump(self, canaries: "Sequence[Canary]", request: Request) -> dict[str, Any]:
        told = sorted((one for canary in canaries for one in canary.recent_events), key=lambda one: one[0])
        events, size = [], 0
        for when, event in reversed(told):
            events.append({"time": when, "event": event.name, "level": event.level, **event.fields})
            size += len(repr(events[-1]))
            if size > DUMP_BYTES:
                events.pop()
                break
        return {
            **self._status(canaries, request),
            "versions": _versions(),
            "settings": shown_settings(canaries[0].config) if canaries else {},
            "coverage": [canary.coverage.event().fields for canary in canaries[:16]],
            "stats": [canary.stats() for canary in canaries[:16]],
            "events": events[::-1],
        }

    def _mode(self, canaries: "Sequence[Canary]", request: Request) -> dict[str, Any]:
        mode = _MODES.get(request.value or "")
        if mode is None:
            raise CanaryError(
                f"mode must be log or raise, got {request.value!r}; to let the engine run unchecked for a while, use "
                "pause"
            )
        return self._each(canaries, lambda canary: canary.set_mode(mode))

    def _budget(self, canaries: "Sequence[Canary]", request: Request) -> dict[str, Any]:
        budget = ScrubBudget.parse(request.value)
        return self._each(canaries, lambda canary: canary.set_budget(budget))

    def _pause(self, canaries: "Sequence[Canary]", request: Request) -> dict[str, Any]:
        return self._each(canaries, lambda canary: canary.step.pause())

    def _resume(self, canaries: "Sequence[Canary]", request: Request) -> dict[str, Any]:
        return self._each(canaries, lambda canary: canary.step.resume())

    def _ack(self, canaries: "Sequence[Canary]", request: Request) -> dict[str, Any]:
        acknowledge(request.value or "")
        return {"changed": len(canaries)}

    def _verify(self, canaries: "Sequence[Canary]", request: Request) -> dict[str, Any]:
        return self._verifications.begin(canaries, request.value, request.parked)

    def _verified(self, canaries: "Sequence[Canary]", request: Request) -> dict[str, Any]:
        return self._verifications.look(canaries, request.value or "", request.after)

    def _forget(self, canaries: "Sequence[Canary]", request: Request) -> dict[str, Any]:
        return self._verifications.forget(request.value or "")

    def _each(self, canaries: "Sequence[Canary]", change: "Callable[[Canary], None]") -> dict[str, Any]:
        """Changes all of them; after a refusal, only those before; raises the first refusal."""
        if not canaries:
            raise CanaryError("no pool is guarded in this process yet; try again once the engine has started")
        for canary in canaries:
            change(canary)
        return {"changed": len(canaries)}


_COMMANDS: "dict[str, Callable[[Commands, Sequence[Canary], Request], dict[str, Any]]]" = {
    "status": Commands._status,
    "dump": Commands._dump,
    "mode": Commands._mode,
    "budget": Commands._budget,
    "pause": Commands._pause,
    "resume": Commands._resume,
    "ack": Commands._ack,
    "verify": Commands._verify,
    "verified": Commands._verified,
    "forget": Commands._forget,
}


def status(canary: "Canary") -> dict[str, Any]:
    """State and figures of ``canary``, as of the host's last read of its counters."""
    state = "paused" if canary.step.paused else "on" if canary.enabled else "off"
    return {
        "model": canary.config.model,
        "served_model": canary.config.served_model,
        "replica": canary.config.replica,
        "rank": canary.config.rank,
        "device": str(canary.device),
        "state": state,
        "mode": canary.mode,
        "profile": canary.config.profile,
        "budget": str(canary.step.scrub.budget),
        "regions": {
            name: {"kind": r.kind.value, "slots": r.slots, "bytes": r.pool_bytes} for name, r in canary.regions.items()
        },
        "coverage_ratio": round(canary.coverage.ratio, 6),
        "memory_bytes": sum(s.memory_bytes for s in canary.states.values()),
        "last_check_age_s": age_s(canary.last_check),
        "last_alarm_test_age_s": age_s(canary.last_alarm_test),
        "detection_s": canary.detection_s,
        "unknown_slots": canary.unknown_slots,
        "findings": {f"{kind.name.lower()} in {region}": n for (kind, region), n in dict(canary.found).items()},
        "incidents": sum(dict(canary.incident_counts).values()),
        **{name: value for name, value in canary.stats().items() if name in _SHOWN},
        **canary.scrub_stats(),
        **canary.overhead_stats(),
    }


_MODES: dict[str, Literal["log", "raise"]] = {"log": "log", "raise": "raise"}

_SHOWN = (
    "violations", "forwards", "checked_forwards", "checked_slots", "checked_bytes", "recorded_slots", "unsure",
    "computed_tokens", "guarded_tokens", "guarded_ratio", "alarm_tests", "alarm_dead", "ledger_doubt_ratio",
    "recompute_same", "recompute_differs", "recompute_unjudged", "recompute_taught", "attention_looks",
)  # fmt: skip


def _versions() -> dict[str, str]:
    own = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return {**own, **versions(("canary-core", "triton", "sglang", "transformers", "vllm"))}
