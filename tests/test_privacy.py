"""No token of a prompt is in anything that Canary tells, unless asked for."""

import io
import json
import sys
from pathlib import Path

import pytest
import structlog
from support.guarded import Guarded
from typer.testing import CliRunner

from canary_core import Kind, Phase, Violation, ViolationError, hookimpl
from canary_desk.cli.app import app
from canary_desk.control.commands import Commands
from canary_desk.control.messages import Request
from canary_desk.metrics.readings import Readings

SECRET = 7_654_321
"""Tokens that occur nowhere else begin with its first digits."""

STORED, FOUND = 0x1234ABCD5678EF01, 0x0FEDCBA987654321
"""Prefix hashes, as they are printed."""


class Plugin:
    """Keeps what a plugin is told, as text."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        """A finding."""
        self.told.append(repr(violation))

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str | None:
        """Only who may dismiss it is told the tokens, and dismisses one."""
        assert violation.token is None or str(violation.token).startswith(str(SECRET)[:-2])
        return "it is known" if violation.slot == 60 else None


def everything_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> dict[str, str]:
    """By the place where it is told: texts about findings of each kind, all of which know tokens, and a wrong token."""
    structlog.reset_defaults()
    log, plugin = io.StringIO(), Plugin()
    monkeypatch.setattr(sys, "stderr", log)
    config = {"violation_level": "error", "log_level": "debug", "log_format": "json", "incident_limit": 0}
    guarded = Guarded(None, plugin, incident_dir=str(tmp_path), **config, **settings)
    request = guarded.engine.submit("a", [SECRET + i for i in range(6)])
    guarded.step()
    request.tokens[2] = SECRET + 50
    guarded.decode()
    facts = {"token": SECRET, "stored_token": SECRET + 7, "request": "a", "stored_request": "b", "position": 3}
    numbers = {"stored_position": 3, "stored_value": STORED, "found_value": FOUND}
    for number, kind in enumerate(k for k in Kind if k.name not in KV):
        for phase in Phase:
            slot = 1000 * number + 8 * phase
            guarded.canary.report([Violation(kind, "full", phase, step=9, slot=slot, **facts, **numbers)])
    sampled = {**facts, "stored_value": SECRET, "slot": 20}
    guarded.canary.report([Violation(Kind.WRITE_INPUT, "full", Phase.PRE_FORWARD, step=9, **sampled)])
    guarded.canary.report([Violation(Kind.LOST_WRITE, "full", Phase.POST_FORWARD, step=9, **facts, slot=60)])
    readings = Readings()
    readings.add(guarded.canary)
    dump = Commands(readings, writable=False).answer(Request(command="dump"))
    guarded.canary.close()
    bundles = [path for path in tmp_path.iterdir() if path.is_dir()]
    pages = []
    for path in bundles[:6]:
        page = tmp_path / "page.html"
        for options in (["--report"], ["--html", str(page)], ["--check"]):
            pages.append(CliRunner().invoke(app, ["explain", str(path), *options]).output)
        pages.append(page.read_text())
    error = ViolationError(guarded.violations[0], guarded.canary.incidents[0])
    return {
        "log": log.getvalue(),
        "events": repr([(event.name, event.fields) for event in guarded.findings.events]),
        "plugin": "".join(plugin.told),
        "dump": json.dumps(dump.result, default=str),
        "bundles": "".join(file.read_text() for path in bundles for file in path.iterdir()),
        "pages": "".join(pages),
        "error": f"{error} {error!r} {error.violation!r}",
    }


KV = {
    "BYTES",
    "LOST_WRITE",
    "NON_FINITE",
    "ARRIVAL",
    "WRITE_SLOT",
    "READ_TABLE",
    "READ_LENGTH",
    "TWO_WRITERS",
    "WEIGHTS",
    "RANKS",
}
"""Kinds whose values are of KV, slots, lengths, indices, parameters or forwards."""


def told(texts: dict[str, str]) -> dict[str, bool]:
    """Where a token, or a number from which one could be worked out, was told."""
    hashes = [str(STORED), str(FOUND), f"{STORED:016x}", f"{FOUND:016x}", f"{SECRET:016x}"]
    return {
        place: str(SECRET)[:-2] in text or any(number in text for number in hashes) for place, text in texts.items()
    }


def test_no_token_is_told_unless_asked_for(tmp_path, monkeypatch):
    """Neither in a sentence nor as a field, in no log, event, plugin, dump, bundle, page, report and error."""
    assert not any(told(everything_told(tmp_path, monkeypatch)).values())


def test_tokens_are_told_where_asked_for(tmp_path, monkeypatch):
    """Else the test above would prove nothing."""
    found = told(everything_told(tmp_path, monkeypatch, incident_tokens=True))
    assert all(found.values()), found


def test_a_finding_of_the_sampler_stays_one_without_its_token():
    """Its sentence says what happened, and not what was sampled."""
    one = Violation(
        Kind.WRITE_INPUT, "full", Phase.PRE_FORWARD, step=3, slot=4, position=9, token=142, stored_token=143,
        stored_value=142, request="a",
    )  # fmt: skip
    assert one.redacted().explanation.startswith("the sampler gave a a token for position 9, but the forward computed")
    assert one.redacted().redacted() == one.redacted()
    flip = Violation(Kind.BYTES, "full", Phase.SCRUB, step=3, slot=4, stored_value=5, found_value=6)
    assert flip.redacted() is flip


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"kind": Kind.WRITE_INPUT, "stored_position": 9},
            "the forward computed another token than the request's own at position 9 for a: the batch",
        ),
        (
            {"kind": Kind.WRITE_INPUT, "stored_position": 8},
            "the forward computed a token at position 8 for a, who is at position 9: the batch",
        ),
        (
            {"kind": Kind.TOKEN, "phase": Phase.EVENT},
            "the sampler gave a a token for position 9, but the request's own list has another token there: what",
        ),
        ({"kind": Kind.TOKEN}, "a expects a token at position 9, a slot holds another token written by"),
        ({"kind": Kind.LOST_WRITE}, "a should have written a token at position 9 to a slot, whose bytes are what"),
    ],
)
def test_a_sentence_without_tokens_says_what_happened(fields, says):
    """What is wrong is the same: a token that is not told is no position that is wrong."""
    given = {"region": "full", "phase": Phase.PRE_FORWARD, "step": 3, "request": "a", "position": 9, **fields}
    assert Violation(**given, token=142, stored_token=143).redacted().explanation.startswith(says)
