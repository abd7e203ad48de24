"""The metrics: name, meaning, labels, and source of each. The table of docs/metrics.md."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from canary_desk.metrics.readings import MetricReading, Owner, Totals

PREFIX = "kv_canary_"
OWNER = ("replica", "rank", "model")
"""Labels of every metric: the replica of the engine, the process within the replica, and the model: a draft model's own
name, or the engine's served name, empty where unknown."""

Together = Literal["sum", "min", "max"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric. ``labels``: in the order of `Family.labels`."""

    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``name`` without `PREFIX`, and without a counter's ``_total``. ``extra``: labels beside `OWNER`.
    ``read``: the values of one Canary, or of ended ones, by the values of ``extra``. ``together``: combines the values
    of several Canaries of one replica, rank and model."""

    name: str
    help: str
    read: Callable[[Totals], Mapping[tuple[str, ...], float]]
    kind: Literal["counter", "gauge"] = "gauge"
    extra: tuple[str, ...] = ()
    together: Together = "sum"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all labels."""
        return (*self.extra, *OWNER)

    @property
    def full_name(self) -> str:
        """Name in Prometheus."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")

    def samples(self, live: Sequence[MetricReading], ended: Mapping[Owner, Totals]) -> Iterator[Sample]:
        """The values now: of running Canaries, and for counters also of ended ones."""
        values: dict[tuple[str, ...], float] = {}
        parts: list[tuple[Owner, Totals]] = [(r.owner, r) for r in live]
        if self.kind == "counter":
            parts += list(ended.items())
        for owner, part in parts:
            for extra, value in self.read(part).items():
                labels = (*extra, *owner)
                values[labels] = _TOGETHER[self.together]([values[labels], value]) if labels in values else value
        for labels, value in values.items():
            yield Sample(labels, value)


_TOGETHER: dict[Together, Callable[[Iterable[float]], float]] = {"sum": sum, "min": min, "max": max}


def _one(name: str) -> Callable[[Totals], Mapping[tuple[str, ...], float]]:
    """Reads one number without labels of its own; empty where unknown."""

    def read(part: Totals) -> Mapping[tuple[str, ...], float]:
        value = getattr(part, name)
        return {} if value is None else {(): float(value)}

    return read


def _by_name(name: str) -> Callable[[Totals], Mapping[tuple[str, ...], float]]:
    """Reads numbers by a name."""
    return lambda part: {(key,): float(value) for key, value in dict(getattr(part, name)).items()}


def _by_pair(name: str) -> Callable[[Totals], Mapping[tuple[str, ...], float]]:
    """Reads numbers by kind and region."""
    return lambda part: {key: float(value) for key, value in dict(getattr(part, name)).items()}


def _info(part: Totals) -> Mapping[tuple[str, ...], float]:
    return {part.info: 1.0} if isinstance(part, MetricReading) else {}


def _enabled(part: Totals) -> Mapping[tuple[str, ...], float]:
    return {(part.mode,): float(part.enabled)} if isinstance(part, MetricReading) else {}


FAMILIES = (
    Family(
        "incidents",
        "Incidents: findings of one cause, by kind and region of the first one by cause.",
        _by_pair("incidents"),
        "counter",
        ("kind", "region"),
    ),
    Family("violations", "Findings that were reported.", _by_pair("violations"), "counter", ("kind", "region")),
    Family("forwards", "Forwards of the engine that began, as the host counts them.", _one("forwards"), "counter"),
    Family(
        "checked_forwards",
        "Forwards whose check ran on the device: the proof of life.",
        _one("checked_forwards"),
        "counter",
    ),
    Family("slots_checked", "Slots whose mapping was checked before a forward.", _one("slots_checked"), "counter"),
    Family("bytes_checked", "Bytes of the KV cache that were compared.", _one("bytes_checked"), "counter"),
    Family(
        "checks_skipped",
        "What was not checked or not told, and why: unknown_slot (slots), unsure (suspicions), forward_without_view "
        "and paused (forwards), withheld (findings), and what bounds of Canary's own leave out.",
        _by_name("skipped"),
        "counter",
        ("reason",),
    ),
    Family(
        "unknown_slots",
        "Slots of a forward's context that can't be judged, since their bytes came without records; a mean over the "
        "forwards between the last two reads.",
        _one("unknown_slots"),
    ),
    Family(
        "coverage_ratio",
        "Share of the engine's KV bytes that is guarded, 0 to 1.",
        _one("coverage"),
        together="min",
    ),
    Family("guarded_bytes", "KV bytes that are guarded.", _one("guarded_bytes")),
    Family("memory_bytes", "Device memory that Canary takes.", _one("memory_bytes")),
    Family(
        "ledger_doubt_ratio",
        "Share of the KV that comes back which the ledger can't judge, since it has evicted, or was not told of, what "
        "may be stored, 0 to 1.",
        _one("ledger_doubt"),
        together="max",
    ),
    Family(
        "live_bytes_detection_seconds",
        "At most so long after a flip in KV that requests use is it told, at the pace of now.",
        _one("detection_s"),
        together="max",
    ),
    Family(
        "scrub_period_seconds",
        "How long one round of the scrub through the whole pool takes, at the pace of now.",
        _one("scrub_period_s"),
        together="max",
    ),
    Family("weights_bytes", "Bytes of the model's weights that are compared.", _one("weights_bytes")),
    Family(
        "weights_period_seconds",
        "How long one round of the comparison through all weights takes, at the pace of now.",
        _one("weights_period_s"),
        together="max",
    ),
    Family(
        "last_check_timestamp_seconds",
        "When the host last saw that checks go on, as Unix time.",
        _one("last_check"),
        together="max",
    ),
    Family(
        "overhead_ratio",
        "Canary's own time as a share of the engine's steps, measured now and then: part host is its Python code, part "
        "device its kernels, hidden by the engine's or not.",
        _by_name("overhead"),
        extra=("part",),
        together="max",
    ),
    Family(
        "enabled",
        "1 while Canary checks, 0 once it was switched off or while it is paused, by mode.",
        _enabled,
        extra=("mode",),
        together="min",
    ),
    Family(
        "info",
        "1 for each guarded process: its machine, its GPU by UUID and by address on the bus, and the version, profile "
        "and mode of its Canary, and the layers whose bytes it guards.",
        _info,
        extra=("host", "gpu", "pci", "version", "profile", "mode", "layers"),
        together="max",
    ),
    Family("paused", "1 while somebody has paused Canary.", _one("paused"), together="max"),
    Family(
        "self_test",
        "1 where CANARY_FAULTS is set: incidents are of faults that were injected on purpose.",
        _one("self_test"),
        together="max",
    ),
    Family("computed_tokens", "Tokens that the engine itself says it computed.", _one("computed_tokens"), "counter"),
    Family("guarded_tokens", "Tokens whose KV was recorded.", _one("guarded_tokens"), "counter"),
    Family(
        "guarded_ratio",
        "Tokens whose KV was recorded among those that the engine itself says it computed.",
        _one("guarded_ratio"),
        together="min",
    ),
    Family(
        "missing_tokens",
        "Tokens that the engine itself says it computed, that were not recorded, and for no reason that was told.",
        _one("missing_tokens"),
        together="max",
    ),
    Family(
        "alarm_tests",
        "Probes with a fingerprint that is wrong on purpose that came out of the alarm, as findings do.",
        _one("alarm_tests"),
        "counter",
    ),
    Family(
        "repairs",
        "Changed words of parked KV with CANARY_REPAIR, by outcome: repaired (put back, and proven), failed (not "
        "proven, and undone), declined (left as it was).",
        _by_name("repairs"),
        "counter",
        ("outcome",),
    ),
    Family(
        "recomputes",
        "Requests that were to be computed again, by outcome: same, differs, gone, and why there is no verdict.",
        _by_name("recomputes"),
        "counter",
        ("outcome",),
    ),
    Family("recomputed_tokens", "Tokens that were computed again.", _one("recomputed_tokens"), "counter"),
    Family("alarm_dead", "1 where a probe did not come out of the alarm.", _one("alarm_dead"), together="max"),
    Family(
        "last_alarm_test_timestamp_seconds",
        "When a probe last came out of the alarm, as Unix time.",
        _one("last_alarm_test"),
        together="min",
    ),
)
"""All metrics, findings first."""
