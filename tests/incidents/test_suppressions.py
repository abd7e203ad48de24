"""Known incidents, by signature: told and kept as ever, marked, and nobody needs to act."""

import pytest
from support.flipped import flipped

from canary_core import ViolationError
from canary_desk.control.commands import Commands
from canary_desk.control.messages import Request
from canary_desk.incidents import suppressions
from canary_desk.incidents.signature import Signature
from canary_desk.incidents.suppressions import Suppressions
from canary_desk.metrics.readings import Readings

TEXT = "bytes:flipped_bit:1:bit:-"


@pytest.fixture(autouse=True)
def nothing_acknowledged(monkeypatch):
    """Of other tests."""
    monkeypatch.setattr(suppressions, "ACKNOWLEDGED", {})


@pytest.mark.parametrize("line", [TEXT, "bytes:flipped_bit:*", Signature("bytes", "flipped_bit", "1", "bit").id])
def test_a_known_incident_is_marked_and_no_error(line, tmp_path):
    """By its text, a pattern or its id; the reason is told. It stays an incident."""
    file = tmp_path / "known"
    file.write_text(f"# known\n\n{line}  # ticket 12\n")
    findings = flipped(suppressions=str(file))
    (event,) = findings.told("diagnosis")
    assert (event.level, event.fields["suppressed"]) == ("warning", f"suppressed by {line}: ticket 12")
    assert len(findings.told("incident")) == 1


def test_another_incident_is_told_as_ever(tmp_path):
    """A pattern of another layer suppresses nothing."""
    file = tmp_path / "known"
    file.write_text("bytes:flipped_bit:2:*\n")
    (event,) = flipped(suppressions=str(file)).told("diagnosis")
    assert (event.level, "suppressed" in event.fields) == ("error", False)


def test_a_known_incident_stops_nothing_in_raise_mode(tmp_path):
    """As a sanitizer's; any other does."""
    file = tmp_path / "known"
    file.write_text(TEXT)
    assert len(flipped(suppressions=str(file), mode="raise").told("diagnosis")) == 1
    with pytest.raises(ViolationError):
        flipped(mode="raise")


@pytest.mark.parametrize("what", ["missing", "a pipe", "a folder"])
def test_a_file_that_cannot_be_read_suppresses_nothing_and_is_told(what, tmp_path):
    """Once, and nobody waits for a pipe."""
    file = tmp_path / "known"
    if what == "a pipe":
        __import__("os").mkfifo(file)
    if what == "a folder":
        file.mkdir()
    findings = flipped(suppressions=str(file))
    (event,) = findings.told("suppressions_unavailable")
    assert "CANARY_SUPPRESSIONS" in event.fields["reason"]
    assert findings.told("diagnosis")[0].level == "error"


def test_an_operator_acknowledges_one_over_the_socket():
    """Where changes are allowed; what is no signature is refused with a sentence."""
    asked = Request(command="ack", value=TEXT)
    assert "CANARY_CONTROL=write" in str(Commands(Readings(), writable=False).answer(asked).error)
    commands = Commands(Readings(), writable=True)
    assert "is no signature" in str(commands.answer(Request(command="ack", value="all")).error)
    assert commands.answer(asked).error is None
    (event,) = flipped().told("diagnosis")
    assert event.fields["suppressed"] == "acknowledged by canary ctl ack"
    assert Suppressions("").reason(Signature("bytes", "flipped_bit", "2", "bit")) == ""
