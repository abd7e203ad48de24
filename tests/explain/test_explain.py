"""``canary explain``: from the bundle of a real run to a report, a page, a check, and a text for a bug tracker."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.guarded import Guarded
from support.toy import ToyEngine
from typer.testing import CliRunner

from canary_core.desk.cli.app import app
from canary_core.desk.explain import page, tell
from canary_core.desk.incidents.bundle import read_bundle

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
