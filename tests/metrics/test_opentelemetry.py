"""The same numbers as instruments of OpenTelemetry."""

import sys

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from support.guarded import Guarded

from canary_core.errors import MetricsError
from canary_desk.metrics import opentelemetry
from canary_desk.metrics.families import FAMILIES, PREFIX
from canary_desk.metrics.readings import Readings


def test_instruments_have_what_a_scrape_has():
    """Each metric has its name without ``_total``, and its labels as attributes."""
    readings, reader = Readings(), InMemoryMetricReader()
    opentelemetry.observe(readings, MeterProvider(metric_readers=[reader]))
    guarded = Guarded(read_check=-1)
    request = guarded.submit(tokens=6)
    guarded.step()
    guarded.engine.v[1][request.slots[2], 3] += 1
    guarded.decode()
    readings.add(guarded.canary)
    data = reader.get_metrics_data()
    assert data is not None
    metrics = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert metrics.keys() <= {PREFIX + family.name for family in FAMILIES}
    (point,) = (point for point in metrics["kv_canary_violations"].data.data_points if point.value)
    assert (point.value, dict(point.attributes)) == (
        1, {"kind": "bytes", "region": "full", "replica": "0", "rank": "0", "model": ""},
    )  # fmt: skip
    (point,) = metrics["kv_canary_forwards"].data.data_points
    assert point.value == 2


def test_without_opentelemetry_it_is_one_sentence(monkeypatch):
    """Which names the extra."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MetricsError, match=r"canary-core\[opentelemetry\]"):
        opentelemetry.observe(Readings())
