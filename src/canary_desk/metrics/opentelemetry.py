"""Gives the metrics to OpenTelemetry: observable instruments of the process's meter provider. Needs the extra
``canary-core[opentelemetry]``."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from canary_core.errors import MetricsError
from canary_desk.metrics.families import FAMILIES, PREFIX, Family
from canary_desk.metrics.readings import Readings

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

METER = "canary_core"
"""Name of the meter."""


def observe(readings: Readings, provider: Any = None) -> None:
    """All metrics are instruments of ``provider``'s meter from now on, by default of the process's: the same names
    without ``_total``, labels as attributes. Raises `MetricsError` where OpenTelemetry is not installed."""
    try:
        from opentelemetry import metrics
    except ImportError as error:
        raise MetricsError(
            f"CANARY_METRICS=opentelemetry needs OpenTelemetry ({error}); pip install 'canary-core[opentelemetry]'"
        ) from error
    meter = metrics.get_meter(METER, meter_provider=provider)
    for family in FAMILIES:
        make = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_gauge
        make(PREFIX + family.name, callbacks=[_callback(readings, family)], description=family.help)


def _callback(readings: Readings, family: Family) -> "Callable[[CallbackOptions], Iterable[Observation]]":
    from opentelemetry.metrics import Observation

    def read(options: "CallbackOptions") -> Iterable[Observation]:
        try:
            live, ended = readings.take()
            samples = list(family.samples(live, ended))
        except Exception:
            # Some other thread is changing what is read; the next export will do.
            return []
        return [Observation(s.value, dict(zip(family.labels, s.labels, strict=True))) for s in samples]

    return read
