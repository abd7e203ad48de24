"""``canary explain``: from the bundle of a real run to a report, a page, a check, and a text for a bug tracker."""

import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from explain.mutations import outcomes
from support.guarded import Guarded
from support.toy import ToyEngine
from typer.testing import CliRunner

from canary_desk.cli.app import app
from canary_desk.explain import page, tell
from canary_desk.incidents.bundle import read_bundle

EXAMPLE = Path(__file__).parents[2] / "examples" / "incident"
"""Of real continuous batching: KV of one request was written over another's."""


def run(*arguments: str) -> "object":
    """The command, 80 columns wide."""
    return CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "80"})


def flipped(directory: Path, **settings: object) -> Path:
    """The bundle of a flipped bit of a request whose name has HTML in it."""
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, incident_dir=str(directory), **settings)
    request = guarded.engine.submit("<b>mallory</b>", [4_711_000 + i for i in range(12)])
    guarded.step(8)
    guarded.engine.k[1].view(torch.int32)[request.slots[5], 3] ^= 1 << 30
    guarded.step(4)
    guarded.canary.close()
    (path,) = directory.iterdir()
    return path


def test_the_example_is_explained():
    """The report says what happened, to whom, since when, who wrote it and what to do, on 80 columns."""
    result = run(str(EXAMPLE))
    assert result.exit_code == 0
    for part in ("alice", "bob", "written over", "step", "█", "What to do next", "canary explain", "Resembles"):
        assert part in result.output, part
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_check_is_repeated_on_the_bundle_alone():
    """The same diagnosis, from nothing but its files."""
    result = run(str(EXAMPLE), "--check")
    assert (result.exit_code, "overwritten" in result.output) == (0, True)


def test_a_diagnosis_that_does_not_come_out_is_told(tmp_path):
    """Exit code 1, and what differs."""
    path = flipped(tmp_path)
    other = json.loads((path / "incident.json").read_text())
    other["diagnoses"][0]["diagnosis"] = "zeroed"
    rewrite(path, "incident.json", json.dumps(other).encode())
    result = run(str(path), "--check")
    assert result.exit_code == 1
    assert "flipped_bit" in result.stderr


def rewrite(path: Path, name: str, content: bytes) -> None:
    """A file of a bundle, with a manifest that fits."""
    import hashlib

    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / name).write_bytes(content)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_the_page_needs_nothing_else(tmp_path):
    """No script, no address, nothing that is loaded; it follows the reader's choice of dark and light."""
    file = tmp_path / "page.html"
    assert run(str(EXAMPLE), "--html", str(file)).exit_code == 0
    text = file.read_text()
    assert not re.search(r"<script|<link|<img|src=|href=|https?:|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


class Balanced(HTMLParser):
    """Raises where tags are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_what_a_bundle_holds_is_escaped(tmp_path):
    """A request may be named as anything."""
    text = page(tell(read_bundle(flipped(tmp_path))))
    assert "<b>mallory" not in text
    assert "&lt;b&gt;mallory" in text
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []


def test_a_flipped_bit_is_shown_before_and_after(tmp_path):
    """Decoded as the pool's numbers."""
    story = tell(read_bundle(flipped(tmp_path)))
    (number,) = story.numbers
    assert (number.source, number.element) == ("k.1", 7)
    before, after = (int(text, 16) for text in (number.before_hex, number.after_hex))
    assert before ^ after == 1 << 14
    assert float(number.before) != float(number.after)
    assert number.before in page(story)


def test_the_timeline_and_the_heat_map(tmp_path):
    """Who wrote the slot and when, and what was found; one place differs."""
    story = tell(read_bundle(flipped(tmp_path)))
    assert [(m.step, m.sort) for m in story.timeline] == [(1, "write"), (2, "finding")]
    assert story.heat is not None
    damaged = [(name, i) for name, cells in story.heat.rows for i, c in enumerate(cells) if c == "x"]
    assert [name for name, _ in damaged] == ["k.1"]
    assert story.heat.marks[damaged[0][1]] == "root"


@pytest.mark.parametrize("tokens", [False, True])
def test_the_text_for_a_tracker_names_nobody(tmp_path, tokens):
    """Requests are numbered; neither token ids nor paths are in it, whatever the bundle holds."""
    result = run(str(flipped(tmp_path, incident_tokens=tokens)), "--report")
    assert result.exit_code == 0
    assert "mallory" not in result.output
    assert "4711" not in result.output
    assert str(tmp_path) not in result.output
    for part in ("request 1", "flipped bit", "step 1", "torch"):
        assert part in result.output


def test_the_example_names_nothing_of_where_it_was_made():
    """No path, no host; and no token."""
    text = "".join(file.read_text() for file in EXAMPLE.iterdir())
    assert not re.search(r"/(tmp|home|root|work|usr)/", text)
    assert '"token"' not in text


@pytest.mark.parametrize("what", ["nothing", "foreign", "truncated", "unreadable"])
def test_what_is_no_bundle_is_refused(tmp_path, what):
    """With a sentence and exit code 2, never a traceback."""
    path = tmp_path / "bundle"
    if what != "nothing":
        shutil.copytree(EXAMPLE, path)
    if what == "foreign":
        (path / "manifest.json").write_text('{"format": "zip"}')
    if what == "truncated":
        (path / "evidence.json").write_text("{")
    if what == "unreadable":
        rewrite(path, "incident.json", b'{"root": 3}')
    result = run(str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith("canary: ")
    assert "Traceback" not in result.output


@pytest.fixture
def of_two_ranks(tmp_path, monkeypatch):
    """``write(rank, layer)``: the bundle of a bit that was flipped in a layer of that rank of two, in one directory."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def write(rank: int, position: int) -> Path:
        guarded = Guarded(ToyEngine(layers=3), read_check=-1, incident_dir=str(tmp_path), rank=rank)
        request = guarded.engine.submit("alice", list(range(12)))
        guarded.step(8)
        guarded.engine.k[1].view(torch.int32)[request.slots[position], 3] ^= 1 << 30
        guarded.step(4)
        guarded.canary.close()
        (path,) = [p for p in tmp_path.iterdir() if read_bundle(p).about["rank"] == rank]
        return path

    return write


def test_what_one_rank_alone_told_is_said(of_two_ranks):
    """Rank 1 of 2 has a bundle and rank 0 has none, or one about something else: it is that rank's own memory."""
    path = of_two_ranks(1, 5)
    assert tell(read_bundle(path)).ranks.startswith("of 2 ranks only rank 1 told it here: look at that rank's own")
    of_two_ranks(0, 3)
    assert "rank 0 told something else at that time" in tell(read_bundle(path)).ranks
    result = run(str(path))
    assert "Ranks" in result.output
    assert "only rank 1" in " ".join(result.output.split())
    assert "only rank 1" in page(tell(read_bundle(path)))


def test_what_all_ranks_told_is_no_matter_of_one_device(of_two_ranks):
    """The same finding on both: it is what they have in common. A broken bundle beside them is passed over."""
    path, other = of_two_ranks(0, 5), of_two_ranks(1, 5)
    assert tell(read_bundle(path)).ranks.startswith("rank 1 told the same beside rank 0 of 2")
    (other / "incident.json").write_text("{")
    assert tell(read_bundle(path)).ranks.startswith("of 2 ranks only rank 0 told it")


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"replica": 1}, None),
        ({"model": "draft"}, None),
        ({"host": "node-2"}, "rank 1 on node-2 told the same beside rank 0 of 2"),
        ({}, "rank 1 told the same beside rank 0 of 2"),
    ],
)
def test_ranks_of_other_replicas_are_none_of_this_engines(about, told, of_two_ranks):
    """Nor are those that serve another model; a rank on another machine is named with it."""
    path, other = of_two_ranks(0, 5), of_two_ranks(1, 5)
    file = other / "about.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **about}))
    assert tell(read_bundle(path)).ranks.startswith(told or "of 2 ranks only rank 0 told it here: look at")


def test_an_engine_of_one_rank_says_nothing_of_ranks(tmp_path):
    """Nor does a bundle of before there was a number of ranks."""
    assert tell(read_bundle(flipped(tmp_path))).ranks == ""
    assert tell(read_bundle(EXAMPLE)).ranks == ""


def test_whose_answers_are_wrong_and_whether_they_were_held_back(tmp_path):
    """A reader's answer leaves a log-mode engine, and not one that was stopped; who shared nothing is not named."""
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, incident_dir=str(tmp_path / "log"))
    guarded.engine.submit("alice", list(range(100, 112)))
    guarded.engine.submit("bob", list(range(200, 212)))
    guarded.step(8)
    guarded.engine.k[1].view(torch.int32)[guarded.engine.requests[0].slots[5], 3] ^= 1 << 30
    guarded.step(4)
    guarded.canary.close()
    (path,) = (tmp_path / "log").iterdir()
    story = tell(read_bundle(path))
    assert [(row.request, row.part, row.retract) for row in story.affected] == [("alice", "read it at step 2", True)]
    assert story.answers.startswith("The answer of alice may be wrong and was not held back")
    assert story.to_do[0] == "Retract the answers of alice, or compute them again on another replica."
    about = json.loads((path / "about.json").read_text())
    about["settings"]["CANARY_MODE"] = "raise"
    rewrite(path, "about.json", json.dumps(about).encode())
    story = tell(read_bundle(path))
    assert story.answers == "No answer with damage in it is known to have left the engine"
    assert "the engine was stopped" in story.affected[0].answer


def test_a_former_owner_of_a_slot_keeps_its_answer(tmp_path):
    """Use after free: the reader is wrong, whoever had the slot before is not."""
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, incident_dir=str(tmp_path))
    slots, ids = guarded.canary.slots, guarded.engine.writers.id
    slots.alloc("full", torch.arange(1, 20), ids("ann"))
    ann = guarded.submit("ann", 8)
    guarded.step(8)
    slots.free("full", torch.tensor(ann.slots), ids("ann"))
    ann.name = "bob"
    ann.tokens.append(9)
    guarded.step(8)
    guarded.canary.close()
    (path, *_) = tmp_path.iterdir()
    rows = {row.request: row.retract for row in tell(read_bundle(path)).affected}
    assert rows == {"bob": True, "ann": False}


def test_a_self_test_is_marked_everywhere(tmp_path):
    """On the page, on the terminal, in each event: nobody is woken for it."""
    guarded = Guarded(
        ToyEngine(layers=3), read_check=-1, incident_dir=str(tmp_path), faults="real_kv_used:warmup=1", seed=3
    )
    guarded.submit("alice", 12)
    for _ in range(3):
        guarded.step(4)
    guarded.canary.close()
    (path, *_) = tmp_path.iterdir()
    assert all(e.fields.get("self_test") for e in guarded.findings.events if e.name in ("incident", "diagnosis"))
    story = tell(read_bundle(path))
    assert story.self_test.startswith("self-test: a fault was injected on purpose")
    assert story.to_do == ["Nothing, if the self-test was meant; else unset CANARY_FAULTS and restart the engine."]
    assert "SELF-TEST" in run(str(path)).output
    assert story.self_test in page(story).replace("&#39;", "'")
    assert tell(read_bundle(flipped(tmp_path / "real"))).self_test == ""


def test_a_lost_write_is_in_the_heat_map_and_nobody_is_about_to_read(tmp_path):
    """The layer that was not written has a letter and a colour of its own; the timeline says whose write it was."""
    engine = ToyEngine(layers=3)
    guarded = Guarded(engine, read_check=-1, incident_dir=str(tmp_path))
    guarded.submit("alice", 12)
    guarded.step(4)
    kept, forward = engine.k[2].clone(), engine.forward

    def loses(batch):
        forward(batch)
        engine.k[2].copy_(kept)

    kept.copy_(engine.k[2])
    engine.forward = loses
    guarded.step(4)
    guarded.canary.close()
    (path,) = tmp_path.iterdir()
    story = tell(read_bundle(path))
    cells = dict(story.heat.rows)
    assert "l" in cells["k.2"]
    assert all("l" not in letters for name, letters in cells.items() if name != "k.2")
    text = " ".join(m.text for m in story.timeline)
    assert "in the forward in which alice writes it" in text
    assert "about to be read" not in text
    assert 'class="l"' in page(story)


def test_times_are_by_the_clock(tmp_path):
    """In UTC, and between what is known where steps have no time of their own; equal lines are one with a number."""
    from canary_desk.explain.affected import StepTimes, folded

    clock = StepTimes([(0, 0.0), (100, 3600.0), (101, 3601.0)])
    assert [clock.at(step) for step in (50, 101, 102)] == ["00:00:00 to 01:00:00", "01:00:01", ""]
    assert list(folded([("a", "b", "c")] * 3 + [("a", "b", "d")])) == [("a", "b", "c (3 times)"), ("a", "b", "d")]
    assert re.search(r"told on \d{4}-\d\d-\d\d, \d\d:\d\d:\d\d UTC", tell(read_bundle(flipped(tmp_path))).when)


def test_no_change_of_a_bundle_brings_a_traceback():
    """Whatever stands in the files, or in their place: an explanation, or one sentence and exit code 2, within seconds.
    ``python tests/explain/mutations.py 10000`` tries more."""
    good = ("explained", "differs", "refused")
    tried = list(outcomes(60, seed=1_000_000))
    assert [told for told in tried if told[1] not in good] == []
    assert {what for _, what in tried} >= {"explained", "refused"}


@pytest.mark.parametrize("what", ["pipe", "hole", "deep"])
def test_a_bundle_beside_that_is_none_is_passed_over(of_two_ranks, what):
    """A pipe would wait for ever, a hole take all memory."""
    path = of_two_ranks(1, 5)
    for file in ("manifest.json", "about.json", "incident.json"):
        other = path.parent / f"incident-{what}" / file
        other.parent.mkdir(exist_ok=True)
        if what == "pipe":
            os.mkfifo(other)
        elif what == "hole":
            with other.open("wb") as hole:
                hole.truncate(1 << 40)
        else:
            other.write_text("[" * 1_000_000)
    assert run(str(path)).exit_code == 0
