"""`add_spans`: tells OpenTelemetry of an incident, in the traces of the requests concerned."""

from typing import Any

from canary_core.incident import Incident

TRACER, SPAN = "canary_core", "kv_cache_incident"
"""Names of the tracer, and of the span and its event."""

MOST_SPANS = 64
"""Requests that get a span."""


def add_spans(incident: Incident, provider: Any = None) -> None:
    """Adds a span to the trace of each request of a diagnosed incident: a child of the client's span, without a
    duration, with one event, whose attributes are the incident's. Status error, but for a suppressed incident.

    ``provider``: of the tracer, by default the process's, which decides on sampling and export. Does nothing where
    OpenTelemetry is not installed; engines with tracing have it.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return
    tracer, propagator = trace.get_tracer(TRACER, tracer_provider=provider), TraceContextTextMapPropagator()
    root = incident.root
    about: dict[str, str | int] = {
        "canary.incident": incident.number, "canary.kind": root.kind.name.lower(), "canary.region": root.region,
        "canary.rank": root.rank, "canary.signature": incident.signature, "canary.explanation": root.explanation,
        **({"canary.diagnosis": incident.diagnoses[0].name} if incident.diagnoses else {}),
        **({"canary.bundle": incident.bundle} if incident.bundle is not None else {}),
        **({"canary.suppressed": incident.suppressed} if incident.suppressed else {}),
    }  # fmt: skip
    for request, traceparent in list(incident.traces.items())[:MOST_SPANS]:
        parent = propagator.extract({"traceparent": traceparent})
        span = tracer.start_span(SPAN, context=parent)
        span.add_event(SPAN, {**about, "canary.request": request})
        if not incident.suppressed:
            span.set_status(trace.StatusCode.ERROR, root.kind.name.lower())
        span.end()
