"""The file that takes an engine out of service: when it appears, and when it goes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from support.flipped import flipped
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core.guard.reporting.budget import PROCESS
from canary_desk.notify.unready import Unready


def told(findings, name):
    """Fields of the events of a name."""
    return [event.fields for event in findings.told(name)]


def test_incidents_of_ten_minutes_make_it(tmp_path):
    """The first of two does not; then a probe finds a reason and a time, and nobody else may read it. Where somebody
    removes it, two more make it again."""
    file = tmp_path / "run" / "unready"
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, unready_file=str(file), unready_after=2)
    for number in (1, 2):
        request = guarded.submit(f"request {number}", 12)
        guarded.step(8)
        guarded.engine.k[number].view(torch.int32)[request.slots[5], 3] ^= 1 << 9
        guarded.step(2)
        guarded.canary.drain()
        assert file.exists() == (number == 2)
    made = json.loads(file.read_text())
    assert (made["reason"], made["pid"]) == ("2 incidents within 600 s", os.getpid())
    assert file.stat().st_mode & 0o777 == 0o600
    (event,) = told(guarded.findings, "unready")
    assert (event["reason"], event["file"]) == (made["reason"], str(file))
    assert list(file.parent.iterdir()) == [file]
    file.unlink()
    for number in (1, 2):
        request = guarded.submit(f"later {number}", 12)
        guarded.step(8)
        guarded.engine.v[number].view(torch.int32)[request.slots[5], 3] ^= 1 << 9
        guarded.step(2)
        guarded.canary.drain()
        assert file.exists() == (number == 2)


def test_a_known_incident_does_not(tmp_path):
    """Its signature is in the file of suppressions."""
    known = tmp_path / "known"
    known.write_text("bytes:flipped_bit:* # a test\n")
    file = tmp_path / "unready"
    findings = flipped(suppressions=str(known), unready_file=str(file), unready_after=1)
    assert told(findings, "diagnosis")[0]["suppressed"]
    assert not file.exists()


def test_a_flood_makes_it_after_one_incident(tmp_path, monkeypatch):
    """More is found than there is time to tell."""
    file = tmp_path / "unready"
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, unready_file=str(file), unready_after=100)
    request = guarded.submit("a", 12)
    guarded.step(8)
    guarded.engine.k[0].view(torch.int32)[request.slots[5], 3] ^= 1
    guarded.step(1)
    guarded.canary.drain()
    monkeypatch.setattr(PROCESS, "left", 0.0)
    monkeypatch.setattr(PROCESS, "refill", lambda: None)
    for name in ("FIRST", "FEW"):
        monkeypatch.setattr(f"canary_core.guard.reporting.budget.{name}", 0)
    for layer in guarded.engine.k:
        layer[request.slots[:8]] += 1
    guarded.step(4)
    guarded.canary.close()
    assert told(guarded.findings, "findings_limited")
    assert json.loads(file.read_text())["reason"] == "a flood of findings"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the start of a process is not known")
def test_a_start_removes_what_an_ended_process_has_left(tmp_path):
    """Also where its number was given out again; what a running process has made, and what is not ours, stays."""
    file = tmp_path / "unready"
    make = "from canary_desk.notify.unready import Unready; Unready(sys.argv[1], 1, print)._make('a test')"
    subprocess.run([sys.executable, "-c", f"import sys; {make}", str(file)], check=True)
    ended = json.loads(file.read_text())
    for left in (ended, {**ended, "pid": os.getpid()}):
        file.write_text(json.dumps(left))
        Guarded(unready_file=str(file)).canary.close()
        assert not file.exists()
    flipped(unready_file=str(file), unready_after=1)
    for kept in (file.read_text(), "somebody's own"):
        file.write_text(kept)
        Guarded(unready_file=str(file)).canary.close()
        assert file.read_text() == kept


@pytest.mark.parametrize("place", ["", "file/unready", "link/unready"])
def test_a_place_where_it_cannot_be_made_is_told_at_the_start(tmp_path, place):
    """A folder, below a file, in a folder that can't be made: once, before it is needed. A good place is left empty."""
    tmp_path.joinpath("file").write_text("")
    tmp_path.joinpath("link").symlink_to("/proc/nope")
    events = []
    Unready(str(tmp_path / place), 1, events.append)
    assert [(event.name, event.level) for event in events] == [("unready_failed", "warning")]
    Unready(str(tmp_path / "new" / "unready"), 1, events.append)
    assert len(events) == 1
    assert list(tmp_path.joinpath("new").iterdir()) == []


def test_what_fails_is_told_and_the_engine_goes_on(tmp_path):
    """Its folder is a file."""
    tmp_path.joinpath("file").write_text("")
    findings = flipped(unready_file=str(tmp_path / "file" / "unready"), unready_after=1)
    (event, *_) = told(findings, "unready_failed")
    assert "Not a directory" in event["reason"] or "File exists" in event["reason"]
    assert told(findings, "diagnosis")
