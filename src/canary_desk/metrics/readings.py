"""`MetricReading`: the figures of one `Canary` as known to the host; `Readings`: those of all in this process."""

import time
from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import ref

from canary_core.config import CanaryConfig
from canary_core.installed import version
from canary_core.layers import turn_of
from canary_core.place import Place
from canary_core.records import Counter, Kind
from canary_core.watchers.recompute.verification import OUTCOMES

if TYPE_CHECKING:
    from canary_core.guard.canary import Canary

Labels = tuple[str, str]
"""Kind and region."""

Owner = tuple[str, str, str]
"""Replica, rank and model."""


@dataclass(slots=True)
class Totals:
    """Sums over the ended Canaries of one replica, rank and model, so that no count goes down."""

    forwards: int = 0
    checked_forwards: int = 0
    slots_checked: int = 0
    bytes_checked: int = 0
    skipped: dict[str, int] = field(default_factory=Tally)
    violations: dict[Labels, int] = field(default_factory=Tally)
    incidents: dict[Labels, int] = field(default_factory=Tally)
    computed_tokens: int = 0
    guarded_tokens: int = 0
    alarm_tests: int = 0
    repairs: dict[str, int] = field(default_factory=Tally)
    recomputes: dict[str, int] = field(default_factory=Tally)
    recomputed_tokens: int = 0

    def add(self, other: "Totals") -> None:
        """One more."""
        for name in Totals.__dataclass_fields__:
            before, more = getattr(self, name), getattr(other, name)
            if isinstance(before, Tally):
                before.update(more)
            else:
                setattr(self, name, before + more)


@dataclass(slots=True, kw_only=True)
class MetricReading(Totals):
    """Figures of one `Canary`, as of the host's last read of its counters. ``skipped``: unchecked work, by reason.
    ``owner``: of `Place.labels`; ``info``: machine, GPU, its address, version, profile, mode, layers. ``violations``,
    ``incidents``: numbers by kind and region, whether or not each was reported by itself. None: unknown, or not
    applicable.

    Taken from any thread, without a look at the device.
    """

    owner: Owner
    info: tuple[str, ...]
    mode: str
    enabled: bool
    paused: bool
    self_test: bool
    unknown_slots: float = 0.0
    coverage: float | None = None
    guarded_bytes: int = 0
    memory_bytes: int = 0
    ledger_doubt: float | None = None
    detection_s: float | None = None
    scrub_period_s: float | None = None
    last_check: float | None = None
    overhead: dict[str, float] = field(default_factory=dict)
    guarded_ratio: float | None = None
    missing_tokens: int = 0
    alarm_dead: int | None = None
    last_alarm_test: float | None = None
    weights_bytes: int | None = None
    weights_period_s: float | None = None

    @classmethod
    def of_nobody(cls, place: Place, config: CanaryConfig) -> "MetricReading":
        """Of an unguarded engine at ``place``, where Canary could not start or attach."""
        info = _info(place, config, config.mode)
        return cls(
            owner=place.labels, info=info, mode=config.mode, enabled=False, paused=False, self_test=place.self_test
        )

    @classmethod
    def of(cls, canary: "Canary") -> "MetricReading":
        """The present figures of ``canary``."""
        stats, scrub, overhead = canary.stats(), canary.scrub_stats(), canary.overhead_stats()
        computed, guarded = canary.witness.share(canary)
        skipped = {
            "unknown_slot": stats.get(Counter.UNKNOWN_SLOTS.name.lower(), 0),
            "unsure": stats.get(Counter.UNSURE.name.lower(), 0),
            "forward_without_view": canary.step.unchecked,
            "paused": canary.step.passed_by,
            "withheld": stats.get("withheld", 0),
            "weights_unsure": stats.get("weights_unsure", 0),
            **canary.left_out,
        }
        return cls(
            owner=canary.place.labels,
            info=_info(canary.place, canary.config, canary.mode),
            mode=canary.mode,
            enabled=canary.enabled and not canary.step.paused,
            paused=canary.step.paused,
            self_test=canary.place.self_test,
            forwards=stats["forwards"],
            checked_forwards=stats.get(Counter.CHECKED_FORWARDS.name.lower(), 0),
            slots_checked=stats.get(Counter.CHECKED_SLOTS.name.lower(), 0),
            bytes_checked=stats.get(Counter.CHECKED_BYTES.name.lower(), 0),
            skipped=skipped,
            violations=_named(canary.found, canary.regions),
            incidents=_named(canary.incident_counts, canary.regions),
            unknown_slots=canary.unknown_slots,
            coverage=canary.coverage.ratio,
            guarded_bytes=canary.coverage.guarded_bytes,
            memory_bytes=sum(s.memory_bytes for s in canary.states.values())
            + int(scrub.get("weights_memory_bytes", 0)),
            ledger_doubt=canary.ledger_doubt,
            detection_s=canary.detection_s,
            scrub_period_s=scrub.get("scrub_period_s"),
            last_check=canary.last_check,
            overhead={name.removeprefix("overhead_"): ratio for name, ratio in overhead.items()},
            computed_tokens=computed,
            guarded_tokens=guarded,
            guarded_ratio=canary.witness.ratio,
            missing_tokens=canary.witness.missing,
            alarm_tests=stats.get("alarm_tests", 0),
            alarm_dead=stats.get("alarm_dead"),
            last_alarm_test=canary.last_alarm_test,
            repairs=_repairs(stats) if canary.config.repair else {},
            recomputes={name: stats.get(f"recompute_{name}", 0) for name in OUTCOMES} if canary.verifier else {},
            recomputed_tokens=stats.get("recomputed_tokens", 0),
            weights_bytes=int(scrub["weights_bytes"]) if "weights_bytes" in scrub else None,
            weights_period_s=scrub.get("weights_period_s"),
        )


class Readings:
    """The Canaries of this process, ended ones as `Totals`. Thread-safe; never keeps a Canary alive."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._last: dict[ref[Canary], MetricReading] = {}
        self._ended: dict[Owner, Totals] = {}
        self._refused: dict[Owner, MetricReading] = {}

    def refuse(self, place: Place, config: CanaryConfig) -> None:
        """Counts an engine as wrongly unguarded, until a Canary of the same replica, rank and model is added. If one
        runs, its own reading tells the state, and nothing is done."""
        with self._lock:
            if all(reading.owner != place.labels for reading in self._last.values()):
                self._refused[place.labels] = MetricReading.of_nobody(place, config)

    def add(self, canary: "Canary") -> None:
        """``canary`` guards a pool from now on."""
        with self._lock:
            self._last[ref(canary)] = MetricReading.of(canary)
            self._refused.pop(canary.place.labels, None)

    def end(self, canary: "Canary") -> None:
        """``canary`` was closed; its figures stay in the totals. Does nothing when called again, or for an unknown
        one."""
        with self._lock:
            own = ref(canary)
            if self._last.pop(own, None) is not None:
                self._fold(MetricReading.of(canary))
                canary.witness.hand_over(canary)

    def running(self) -> list["Canary"]:
        """Canaries not yet closed, the oldest first."""
        with self._lock:
            return [canary for canary in (known() for known in self._last) if canary is not None]

    def take(self) -> tuple[list[MetricReading], dict[Owner, Totals]]:
        """The readings of running Canaries, and the totals of ended ones by replica, rank and model."""
        with self._lock:
            for known in list(self._last):
                canary = known()
                if canary is None:
                    # Nobody has closed it: what was read last is what is known.
                    self._fold(self._last.pop(known))
                else:
                    self._last[known] = MetricReading.of(canary)
            return [*self._last.values(), *self._refused.values()], dict(self._ended)

    def _fold(self, reading: MetricReading) -> None:
        self._ended.setdefault(reading.owner, Totals()).add(reading)


def _info(place: Place, config: CanaryConfig, mode: str) -> tuple[str, ...]:
    """`MetricReading.info`."""
    share = config.layers
    layers = "all" if share.parts == 1 else f"1/{share.parts}@{turn_of(config)}"
    return place.host, place.gpu, place.pci, own_version(), config.profile, mode, layers


def _repairs(stats: Mapping[str, Any]) -> dict[str, int]:
    """Outcomes of repairs, by name; 0 for those that never were."""
    names = {"repaired": "repaired", "failed": "repair_failed", "declined": "repair_declined"}
    return {outcome: stats.get(name, 0) for outcome, name in names.items()}


@lru_cache
def own_version() -> str:
    """Version of the installed canary-core; empty where it is not installed as a package."""
    return version("canary-core") or ""


def _named(counts: Mapping[tuple[Kind, str], int], regions: Iterable[str]) -> dict[Labels, int]:
    """``counts`` by kind, in lower case, and region; 0 for each kind of each of ``regions``, so that the first finding
    of a restarted process shows as one more."""
    named = {(kind.name.lower(), region): 0 for region in regions for kind in Kind}
    return named | {(kind.name.lower(), region): number for (kind, region), number in dict(counts).items()}


READINGS = Readings()
"""This process's readings."""


def age_s(moment: float | None) -> float | None:
    """Seconds since ``moment``, of `time.time`."""
    return None if moment is None else max(time.time() - moment, 0.0)


def total(readings: Iterable[MetricReading]) -> Totals:
    """All of ``readings`` in one."""
    added = Totals()
    for reading in readings:
        added.add(reading)
    return added
