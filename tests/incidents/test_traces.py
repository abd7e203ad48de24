"""A request's trace id is wherever an incident is told, and OpenTelemetry gets a span in that trace."""

import sys

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine
from typer.testing import CliRunner

from canary_desk.cli.app import app
from canary_desk.incidents.bundle import read_bundle

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


def flipped(traceparent: str | None, **settings: object) -> Guarded:
    """A toy engine with a flipped bit of the only request, whose client sent ``traceparent``."""
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, **settings)
    request = guarded.submit("a", 12)
    guarded.engine.writers.trace("a", traceparent)
    guarded.step(8)
    guarded.engine.k[1].view(torch.int32)[request.slots[5], 3] ^= 1 << 9
    guarded.step(4)
    guarded.canary.close()
    return guarded


def test_events_bundle_and_pages_have_the_trace(tmp_path):
    """The events of the incident and of its diagnosis, the bundle, and each form of `canary explain`; a report for the
    engine's tracker has not."""
    guarded = flipped(TRACEPARENT, incident_dir=str(tmp_path / "incidents"))
    for name in ("incident", "diagnosis"):
        (event,) = guarded.findings.told(name)
        assert event.fields["traces"] == [TRACE]
    (bundle,) = (tmp_path / "incidents").iterdir()
    assert read_bundle(bundle).incident["traces"] == {"a": TRACE}
    html = tmp_path / "page.html"
    told = CliRunner().invoke(app, ["explain", str(bundle), "--html", str(html)], env={"COLUMNS": "200"})
    assert f"a (trace {TRACE})" in told.output
    assert f"trace {TRACE}" in html.read_text()
    told = CliRunner().invoke(app, ["explain", str(bundle), "--report"])
    assert told.exit_code == 0
    assert TRACE not in told.output


@pytest.mark.parametrize("traceparent", [None, "", "x" * 10_000, f"00-{'0' * 32}-{SPAN}-01", f"{TRACEPARENT}\n"])
def test_what_is_no_trace_is_left_out(traceparent):
    """A client may send anything."""
    (event,) = flipped(traceparent).findings.told("incident")
    assert "traces" not in event.fields


def test_a_trace_ends_with_the_name():
    """Another request of the same name has its own trace, or none; a request that has ended keeps its trace."""
    writers = ToyEngine().writers
    writers.trace("a", TRACEPARENT)
    assert writers.traces("a", "b", None) == {"a": TRACEPARENT}
    writers.forget("a")
    assert writers.traces("a") == {}


def test_a_span_is_in_the_request_s_trace(monkeypatch):
    """With the real SDK: a child of the client's span, with one event that says what was found; a process without
    OpenTelemetry tells the incident all the same."""
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    guarded = flipped(TRACEPARENT)
    (span,) = exporter.get_finished_spans()
    assert (span.name, f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (
        "kv_cache_incident", TRACE, SPAN,
    )  # fmt: skip
    assert span.status.status_code is trace.StatusCode.ERROR
    (event,) = span.events
    (told,) = guarded.findings.told("diagnosis")
    wanted = {
        "canary.incident": 1, "canary.kind": "bytes", "canary.region": "full", "canary.request": "a", "canary.rank": 0,
        "canary.diagnosis": told.fields["diagnosis"], "canary.signature": told.fields["signature"],
    }  # fmt: skip
    assert wanted.items() <= dict(event.attributes).items()
    exporter.clear()
    flipped(None)
    assert exporter.get_finished_spans() == ()
    monkeypatch.setitem(sys.modules, "opentelemetry.trace.propagation.tracecontext", None)
    assert flipped(TRACEPARENT).findings.told("diagnosis")
    assert exporter.get_finished_spans() == ()
