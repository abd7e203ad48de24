"""``canary demo``: serves traffic on a real engine under guard, without one alarm, then breaks its KV cache on purpose.

The engine comes from a plugin (`canary_demo`). Traffic, faults, verdicts and the measurement of cost are decided here,
the same for every engine.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from canary_core import plugins
from canary_core.config import CanaryConfig
from canary_core.config.faults import FaultSpec
from canary_core.errors import PluginError
from canary_core.violation import Violation
from canary_kit.engines import DemoEngine, Job, Served, Traffic
from canary_kit.faults.catalogue import FAULTS
from canary_kit.faults.injector import FaultInjector
from canary_kit.faults.scene import Injection
from canary_kit.findings import Findings
from canary_kit.quiet import unheard
from canary_kit.settings import default_config, strict_config

FAULT_REQUESTS = 24
"""Requests served for each fault."""
OVERHEAD_REQUESTS = 48
OVERHEAD_ROUNDS = 4
"""Rounds of the same requests without and with Canary, in turn."""

EXPLAINED = "real_kv_used"
"""The fault whose bundle is kept."""

ShowProgress = Callable[[str, int], None]
"""Called with the present activity, and the number of requests finished since the last call."""


@dataclass(frozen=True, slots=True)
class Clean:
    """Unbroken traffic under the strictest settings. ``alarms`` are false ones, ``troubles`` error events of ours."""

    forwards: int
    slots_checked: int
    bytes_checked: int
    outputs_identical: bool
    alarms: tuple[Violation, ...] = ()
    troubles: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """No alarm, no trouble, something was checked, and the engine computed the same as without Canary."""
        return self.outputs_identical and self.bytes_checked > 0 and not self.alarms and not self.troubles

    def fields(self) -> dict[str, object]:
        """As in ``canary demo --json``."""
        return {
            "forwards": self.forwards,
            "slots_checked": self.slots_checked,
            "bytes_checked": self.bytes_checked,
            "violations": len(self.alarms),
            "outputs_identical": self.outputs_identical,
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault and its findings. ``found`` name the fault itself, ``others`` are its consequences, ``early`` are false
    alarms from before."""

    fault: str
    injection: Injection | None
    found: tuple[Violation, ...] = ()
    others: tuple[Violation, ...] = ()
    early: tuple[Violation, ...] = ()
    reason: str | None = None
    """Why nothing was injected."""
    troubles: tuple[str, ...] = ()
    """Error events of ours."""

    @property
    def passed(self) -> bool:
        """Injected, found, nothing was found before, and no error of ours."""
        return bool(self.found) and not self.early and not self.troubles

    @property
    def steps(self) -> int | None:
        """Forwards from the fault to its first finding; None if it was missed."""
        return min(v.step for v in self.found) - self.injection.step if self.injection and self.found else None

    @property
    def source(self) -> str | None:
        """Layers and halves named by the findings; None where the fault isn't about bytes."""
        return ", ".join(sorted({v.source for v in self.found if v.source})) or None

    def fields(self) -> dict[str, object]:
        """As in ``canary demo --json``."""
        return {
            "fault": self.fault,
            "injected": int(self.injection is not None),
            "detected": int(bool(self.found)),
            "steps": self.steps,
            "kinds": kinds(self.found),
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All about one model of one engine. ``overhead_pct``: how much longer the same traffic took, default settings."""

    engine: str
    model: str
    clean: Clean
    trials: tuple[Trial, ...]
    overhead_pct: float

    @property
    def passed(self) -> bool:
        """No false alarm and no missed fault."""
        return self.clean.passed and all(t.passed for t in self.trials)

    def fields(self) -> dict[str, object]:
        """The object printed by ``canary demo --json``."""
        return {
            "engine": self.engine,
            "model": self.model,
            "clean": self.clean.fields(),
            "faults": [t.fields() for t in self.trials],
            "overhead_pct": round(self.overhead_pct, 1),
        }


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo of one model. Each part can be run by itself; `steps` always counts the engine's forwards."""

    engine: DemoEngine
    model: str
    seed: int = 0
    requests: int = 240
    progress: ShowProgress = lambda what, finished: None
    incident_dir: str = ""
    """Directory for the bundle of `EXPLAINED`; empty for none."""

    @property
    def total(self) -> int:
        """Requests served by `run` in all."""
        return 2 * self.requests + self._fault_requests * len(FAULTS) + 2 * OVERHEAD_ROUNDS * self._overhead_requests

    def run(self) -> Report:
        """Clean traffic, then every fault, then the cost."""
        with unheard():
            clean, trials = self.clean(), tuple(self.trial(f) for f in FAULTS)
            overhead_pct, late = self.overhead()
        clean = replace(
            clean,
            outputs_identical=clean.outputs_identical and late.outputs_identical,
            alarms=clean.alarms + late.alarms,
            troubles=clean.troubles + late.troubles,
        )
        return Report(self.engine.name, self.model, clean, trials, overhead_pct)

    def clean(self) -> Clean:
        """Serves without Canary, then with a comparison of every byte read by a forward, and of the whole pool after
        it."""
        traffic = Traffic.of(self.requests, self.seed)
        bare = self._serve("serving without Canary", traffic, default_config(mode="off"))
        heard = Findings()
        guarded = self._serve("serving under Canary", traffic, strict_config(), heard)
        return _judged(heard, guarded, bare.outputs == guarded.outputs)

    def trial(self, fault: str) -> Trial:
        """Serves until ``fault`` has happened once, at a forward of the seed's choice, and collects the findings."""
        draw = random.Random(f"{fault} {self.seed}")
        injector = FaultInjector([_once(fault, draw.randrange(3, 10))], self.seed)
        heard = Findings()
        traffic = Traffic.of(self._fault_requests, self.seed)
        kept = {"incident_dir": self.incident_dir, "incident_most": 1} if fault == EXPLAINED else {}
        self._serve(f"injecting {fault}", traffic, strict_config(**kept), heard, injector)
        return judge(fault, injector.injections, heard)

    def overhead(self) -> tuple[float, Clean]:
        """Overhead of Canary's default settings in per cent, by the medians of the times, and the runs' judgement."""
        traffic = Traffic.of(self._overhead_requests, self.seed)
        heard = Findings()
        times: dict[str, list[float]] = {"off": [], "log": []}
        runs: list[Served] = []
        for _ in range(OVERHEAD_ROUNDS):
            for mode, seconds in times.items():
                listeners = (heard,) if mode == "log" else ()
                runs.append(self._serve("measuring the overhead", traffic, default_config(mode=mode), *listeners))
                seconds.append(runs[-1].seconds)
        same = all(r.outputs == runs[0].outputs for r in runs)
        ratio = statistics.median(times["log"]) / statistics.median(times["off"])
        return 100 * (ratio - 1), _judged(heard, runs[-1], same)

    @property
    def _fault_requests(self) -> int:
        return min(FAULT_REQUESTS, self.requests)

    @property
    def _overhead_requests(self) -> int:
        return min(OVERHEAD_REQUESTS, self.requests)

    def _serve(self, what: str, traffic: Traffic, config: CanaryConfig, *extra: object) -> Served:
        self.progress(what, 0)
        job = Job(self.model, self.seed, traffic, config, extra, lambda: self.progress(what, 1))
        return self.engine.serve(job)


def judge(fault: str, injections: Sequence[Injection], heard: Findings) -> Trial:
    """Sorts the findings into the fault itself, its consequences, and those too early to be either."""
    if not injections:
        reasons = [str(event.fields["reason"]) for event in heard.told("fault_not_injected")]
        reason = reasons[-1] if reasons else None
        return Trial(fault, None, early=tuple(heard.violations), reason=reason, troubles=_troubles(heard))
    (injection,) = injections
    found = tuple(v for v in heard.violations if injection.explains(v))
    early = tuple(v for v in heard.violations if v.step < injection.step)
    others = tuple(v for v in heard.violations if v not in found and v not in early)
    return Trial(fault, injection, found, others, early, troubles=_troubles(heard))


def kinds(violations: Sequence[Violation]) -> list[str]:
    """The kinds among ``violations`` in lower case, sorted."""
    return sorted({v.kind.name.lower() for v in violations})


def engines(wanted: str | None = None) -> list[DemoEngine]:
    """Demo engines of the installed plugins, whatever ``CANARY_PLUGINS`` says: asking for a demo allows them.

    Raises `PluginError` if there is none, or not the engine ``wanted``, with the reason.
    """
    offers = [p for p in plugins.installed() if "canary_demo" in p.hooks or (p.error and not p.built_in)]
    reasons = {p.name: p.error or plugins.refusal(p) for p in offers}
    usable = {p.name: p for p in offers if reasons[p.name] is None}
    if wanted is not None and wanted not in usable:
        reason = reasons.get(wanted) or f"no installed plugin demonstrates it; there are {', '.join(usable) or 'none'}"
        raise PluginError(f"engine {wanted!r} can't be demonstrated: {reason}")
    if not usable:
        why = "; ".join(r for r in reasons.values() if r) or "no installed plugin offers one"
        raise PluginError(f"there is nothing to demonstrate: {why}. Try pip install 'canary-transformers[engine]'")
    hooks = plugins.Plugins().manager
    for name, plugin in usable.items():
        if wanted in (None, name):
            hooks.register(plugin.target, name=name)
    found: list[DemoEngine] = hooks.hook.canary_demo()
    return found[::-1]


def _troubles(heard: Findings) -> tuple[str, ...]:
    """Errors of Canary itself: an incident is the engine's."""
    errors = (e for e in heard.events if e.level == "error" and not e.name.startswith(("incident", "diagnosis")))
    return tuple(f"{e.name}: { {k: v for k, v in e.fields.items() if k != 'traceback'} }" for e in errors)


def _judged(heard: Findings, served: Served, outputs_identical: bool) -> Clean:
    stats = served.stats
    return Clean(
        stats.get("forwards", 0),
        stats.get("checked_slots", 0),
        stats.get("checked_bytes", 0),
        outputs_identical,
        tuple(heard.violations),
        _troubles(heard),
    )


def _once(fault: str, warmup: int) -> FaultSpec:
    """The fault, in a forward drawn at random after the ``warmup``."""
    return FaultSpec.model_validate({"fault": fault, "probability": 0.5, "warmup": warmup})
