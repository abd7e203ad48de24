"""What built-in reporting writes, where, and what it leaves alone."""

import io
import json
import logging
import sys
from typing import Any

import pytest
import structlog
import torch

from canary_core import Canary, CanaryConfig, Event, Kind, KVSource, Phase, Region, Violation
from canary_core.plugins import Plugins

FINDING = Violation(Kind.BYTES, "kv", Phase.SCRUB, step=9, slot=5, page=1, source="k.3", layer=3, half="k")


@pytest.fixture
def own_logger():
    """structlog as in a host that never configured it."""
    structlog.reset_defaults()


def stderr_of(capsys: pytest.CaptureFixture[str]) -> str:
    """What was written to stderr, after checking that stdout got nothing."""
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("level", ["debug", "error"])
def test_violation_is_an_event_with_all_its_fields(logs, level):
    """A finding is one event ``violation`` at the level that was asked for, field for field `Violation.fields`."""
    found = Plugins()
    found.load(CanaryConfig.load(violation_level=level))
    found.manager.hook.canary_violation(violation=FINDING)
    (entry,) = logs
    assert {k: entry[k] for k in FINDING.fields()} == FINDING.fields()
    assert (entry["event"], entry["log_level"], entry["logger"]) == ("violation", level, "canary")


def test_event_keeps_name_level_and_fields(logs):
    """An event is logged under its own name and level; a field named like structlog's own keys does no harm."""
    Plugins().emit(Event("stats", "warning", {"slots": 3, "event": "x", "logger": "y"}))
    (entry,) = logs
    assert entry == {"event": "stats", "log_level": "warning", "slots": 3, "logger": "canary"}


@pytest.mark.usefixtures("own_logger")
@pytest.mark.parametrize("form", ["json", "console"])
def test_a_line_is_one_write(monkeypatch, form):
    """Workers of an engine share stderr: with an end of its own write, lines of two of them would become one."""
    writes: list[str] = []
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", writes.append, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    found = Plugins()
    found.load(CanaryConfig.load(log_format=form))
    found.emit(Event("coverage", fields={"kind": "bytes"}))
    assert [write.count("\n") for write in writes] == [1]
    assert writes[0].endswith("\n")


@pytest.mark.usefixtures("own_logger")
def test_json_lines_on_stderr(capsys):
    """CANARY_LOG_FORMAT=json gives one JSON object a line, with time and level, on stderr and nothing on stdout."""
    found = Plugins()
    found.load(CanaryConfig.load(log_format="json", violation_level="error"))
    found.manager.hook.canary_violation(violation=FINDING)
    found.emit(Event("coverage", fields={"kind": Kind.BYTES, "where": logging}))
    first, second = map(json.loads, stderr_of(capsys).splitlines())
    assert first["source"] == "k.3"
    assert {"timestamp", "level", "logger"} <= first.keys()
    assert second["event"] == "coverage"


class ClosedPipe(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def closed_file() -> Any:
    """A stream that was closed."""
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.usefixtures("own_logger")
@pytest.mark.parametrize("stream", [ClosedPipe, closed_file, lambda: None], ids=["pipe", "file", "none"])
def test_a_log_that_cannot_be_written_ends_nothing(stream, monkeypatch):
    """As with logging's own handlers: a full disk or a reader that is gone is not the engine's trouble."""
    canary = Canary([Region("kv", 4, (KVSource(torch.zeros(4, 8), "k", 0, 32, 32),))], CanaryConfig())
    monkeypatch.setattr(sys, "stderr", stream())
    with canary.guard("test"):
        raise ValueError("of ours")
    assert not canary.enabled
    canary.close()
    Plugins().emit(Event("stats"))


def test_what_the_hosts_pipeline_does_not_take_goes_to_stderr(capsys):
    """A finding must not be lost because a processor of the host wants a field that it has not."""

    def wants_more(logger, method, event):
        raise KeyError("request_id")

    structlog.configure(processors=[wants_more, structlog.processors.JSONRenderer()])
    try:
        Plugins().emit(Event("stats", "warning", {"slots": 3}))
    finally:
        structlog.reset_defaults()
    assert "slots=3" in stderr_of(capsys)


@pytest.mark.usefixtures("own_logger")
def test_console_on_stderr_without_colours(capsys):
    """The default is readable text; escape codes are left out where stderr is no terminal."""
    Plugins().emit(Event("stats", fields={"slots": 3}))
    err = stderr_of(capsys)
    assert "slots=3" in err
    assert "\x1b" not in err


@pytest.mark.usefixtures("own_logger")
def test_level_keeps_quieter_events_out(capsys):
    """CANARY_LOG_LEVEL is the least level that is written."""
    found = Plugins()
    found.load(CanaryConfig.load(log_level="error"))
    found.emit(Event("stats", "warning"))
    assert stderr_of(capsys) == ""
    found.emit(Event("disabled", "error"))
    assert "disabled" in stderr_of(capsys)


@pytest.mark.usefixtures("own_logger")
def test_global_logging_setup_is_left_alone(capsys):
    """Reporting changes neither structlog's configuration nor logging's handlers."""
    handlers = list(logging.getLogger().handlers)
    Plugins().emit(Event("stats"))
    assert not structlog.is_configured()
    assert logging.getLogger().handlers == handlers


@pytest.mark.usefixtures("own_logger")
def test_a_host_that_configured_structlog_gets_the_events(capsys):
    """Where the host has set up structlog, its pipeline carries our events, and stderr stays its own."""
    seen = []

    def keep(_logger, _method, event):
        seen.append(dict(event))
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    try:
        Plugins().emit(Event("stats", fields={"slots": 3}))
    finally:
        structlog.reset_defaults()
    assert seen == [{"event": "stats", "slots": 3, "logger": "canary"}]
    assert stderr_of(capsys) == ""


SUMMARY = Event(
    "summary",
    "warning",
    {
        "summary": "2 forwards, 9 slots and 1.2 kB checked, no finding",
        "forwards": 2,
        "events": {"full": {"alloc": 3, "free": 2}, "window": {}},
        "warnings": ["step.end was never called, so nothing was told before the end; call it after each step"],
    },
)


@pytest.mark.usefixtures("own_logger")
def test_a_summary_is_a_page_for_people(capsys):
    """A line for each region and for each warning; no dictionaries."""
    Plugins().emit(SUMMARY)
    first, full, window, warning = stderr_of(capsys).splitlines()
    assert "canary summary: 2 forwards, 9 slots and 1.2 kB checked, no finding" in first
    assert "warning" in first
    assert (full.strip(), window.strip()) == ("events of full: alloc 3, free 2", "events of window: none")
    assert warning.strip().startswith("warning: step.end was never called")


@pytest.mark.usefixtures("own_logger")
def test_a_summary_keeps_its_fields_for_programs(capsys):
    """One line of JSON, as any event."""
    found = Plugins()
    found.load(CanaryConfig.load(log_format="json"))
    found.emit(SUMMARY)
    (line,) = stderr_of(capsys).splitlines()
    told = json.loads(line)
    assert (told["event"], told["level"]) == ("summary", "warning")
    assert {name: told[name] for name in SUMMARY.fields} == SUMMARY.fields


@pytest.mark.usefixtures("own_logger")
def test_a_verdict_is_two_lines_verdict_first(capsys):
    """Whose engine and what to do follow; a self-test says so before anything else."""
    fields = {"incident": 1, "sentence": "This is a flipped bit.", "evidence": ["bit 3 of slot 5"], "host": "n7"}
    more = {"next_steps": ["Run a memory test."], "bundle": "/tmp/b", "signature": "bytes:flipped_bit:1:bit:-"}
    Plugins().emit(Event("diagnosis", "error", {**fields, **more, "self_test": True}))
    first, second = stderr_of(capsys).splitlines()
    assert "canary: SELF-TEST, This is a flipped bit. Incident 1, host n7 (bytes:flipped_bit:1:bit:-)" in first
    assert second == "  bit 3 of slot 5. Run a memory test. More: canary explain /tmp/b"


NASTY = {
    "request": "a\n2026-01-01T00:00:00Z [error    ] incident\x1b[2J\x00\x07\u202e\u2028\ud800",
    "nested": {"k\ney": ["v\x1balue", ("\x9b2J",)]},
    "error": ValueError("of\nours"),
}


@pytest.mark.usefixtures("own_logger")
@pytest.mark.parametrize("form", ["json", "console"])
def test_no_text_from_outside_forges_a_line_or_moves_the_cursor(monkeypatch, form):
    """Whatever release of structlog renders it: one printable line."""
    lines = written(monkeypatch, form, Event("incident", "error", NASTY))
    assert len(lines) == 1
    assert lines[0].isprintable()


def test_a_host_is_given_no_text_that_forges_a_line(logs):
    """Its own renderer may write texts as they are."""
    Plugins().emit(Event("incident", "error", NASTY))
    (entry,) = logs
    assert all(str(value).isprintable() for value in entry.values())


@pytest.mark.usefixtures("own_logger")
@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize(
    "fields",
    [
        {"error": "x" * 1_000_000, "step": 3},
        {"error": "\x00" * 1_000_000, "traceback": "€" * 1_000_000, "step": 3},
        {"requests": ['"' * 200] * 500, "step": 3},
        {"step": 3, **{f"a rather long name of a counter {n}": n for n in range(5000)}},
        {"step": 3, **{f"t{n}": "y" * 500 for n in range(100)}},
    ],
)
def test_a_line_has_at_most_four_kilobytes(monkeypatch, form, fields):
    """The largest fields are cut, so that the small ones stay; of very many the last are left out."""
    (line,) = written(monkeypatch, form, Event("disabled", "error", fields))
    assert len(line.encode()) <= 4096
    assert "disabled" in line
    assert ('"step": 3' if form == "json" else "step=3") in line
    if form == "json":
        json.loads(line)


def written(monkeypatch, form: str, event: Event) -> list[str]:
    """Lines of stderr for ``event``."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    found = Plugins()
    found.load(CanaryConfig.load(log_format=form))
    found.emit(event)
    return [line for line in stream.getvalue().split("\n") if "plugins_loaded" not in line and line]
