"""Answers of running engines over their control sockets, to read and to watch."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from canary_core.errors import ControlError
from canary_core.wording import numbered
from canary_desk.control import client
from canary_desk.control.client import Answer
from canary_desk.control.messages import Request

LEAST_RATIO = 0.99
"""Least guarded share of tokens; a smaller one is shown in red."""

VERDICTS = {
    "recompute_same": "same",
    "recompute_differs": "[bold red]DIFFERENT[/bold red]",
    "recompute_unjudged": "unjudged",
    "recompute_taught": "taught the noise",
    "attention_looks": "looks at attention",
}
"""How counts of second computations are shown."""

STATES = {"on": "[green]on[/green]", "paused": "[yellow]paused[/yellow]", "off": "[bold red]OFF[/bold red]"}


def show(console: Console, answers: Sequence[Mapping[str, Any]]) -> None:
    """The status of each process."""
    for answer in answers:
        console.print(process(answer))


def process(answer: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Group:
    """One process, with a table for each guarded pool. ``before``: an earlier answer, for rates."""
    head = f"[bold]process {answer['pid']}[/bold] {escape(str(answer['program']))}"
    # A process that runs for long may have another release, without what is new.
    head += f" on {escape(answer['host'])}" if "host" in answer else ""
    head += f", up {_time(answer['uptime_s'])}"
    head += ", read and write" if answer["writable"] else ", read only"
    known = {_key(c): c for c in (before or {}).get("canaries", ())}
    elapsed = answer["uptime_s"] - before["uptime_s"] if before else 0.0
    tables = [_pool(c, known.get(_key(c)), elapsed) for c in answer["canaries"]]
    return Group(head, *tables) if tables else Group(head, "no pool is guarded")


def _pool(canary: Mapping[str, Any], before: Mapping[str, Any] | None, elapsed_s: float) -> Table:
    table = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False, expand=False)
    state = STATES.get(canary["state"], canary["state"])
    who = f"replica {canary.get('replica', 0)}, rank {canary['rank']}"
    lines = {
        who: f"{state}, mode {canary['mode']}, {canary['device']}",
        "model": escape(canary["model"] or canary.get("served_model", "")),
        "guarded": ", ".join(f"{n}: {r['slots']} slots, {decimal(r['bytes'])}" for n, r in canary["regions"].items()),
        "coverage": f"{canary['coverage_ratio']:.2%}, for {decimal(canary['memory_bytes'])} of Canary's",
        "forwards": f"{canary['forwards']}{_rate(canary, before, 'forwards', elapsed_s)}",
        "checked": f"{canary.get('checked_slots', 0)} slots{_rate(canary, before, 'checked_slots', elapsed_s)}, "
        f"{decimal(canary.get('checked_bytes', 0))}",
        "tokens": _tokens(canary, before, elapsed_s),
        "last check": _ago(canary["last_check_age_s"]),
        "alarm": _alarm(canary),
        "findings": _findings(canary),
        "recomputed": _recomputed(canary),
        "scrub": _scrub(canary),
        "overhead": ", ".join(
            f"{part} {canary[f'overhead_{part}']:.2%}" for part in ("host", "device") if f"overhead_{part}" in canary
        ),
    }
    for label, text in lines.items():
        if text:
            table.add_row(escape(label), text)
    return table


def _tokens(canary: Mapping[str, Any], before: Mapping[str, Any] | None, elapsed_s: float) -> str:
    """Guarded share of the tokens computed by the engine's own account; empty without such a figure."""
    if "guarded_ratio" not in canary:
        return ""
    ratio = canary["guarded_ratio"]
    share = f"{ratio:.2%} guarded" if ratio >= LEAST_RATIO else f"[bold red]{ratio:.2%} guarded[/bold red]"
    return f"{canary['computed_tokens']} computed{_rate(canary, before, 'computed_tokens', elapsed_s)}, {share}"


def _alarm(canary: Mapping[str, Any]) -> str:
    """Whether a finding would be reported; empty without a scrub, and so without a test."""
    if "alarm_tests" not in canary:
        return ""
    if canary.get("alarm_dead"):
        return "[bold red]DEAD[/bold red]: a finding made on purpose did not come out, so no other would"
    return f"tested {_ago(canary['last_alarm_test_age_s'])}" if canary["alarm_tests"] else "not tested yet"


def _findings(canary: Mapping[str, Any]) -> str:
    if not canary["findings"]:
        return "[green]none[/green]"
    kinds = ", ".join(f"{where} {number}" for where, number in canary["findings"].items())
    return f"[bold red]{numbered(canary['incidents'], 'incident')}[/bold red]: {escape(kinds)}"


def _recomputed(canary: Mapping[str, Any]) -> str:
    """Verdicts by a second computation; empty where nothing was computed again."""
    said = [f"{canary[name]} {text}" for name, text in VERDICTS.items() if canary.get(name)]
    return ", ".join(said)


def _scrub(canary: Mapping[str, Any]) -> str:
    said = [f"budget {canary['budget']}"]
    if "scrub_period_s" in canary:
        said.append(f"a round in {_time(canary['scrub_period_s'])}, {canary['scrub_coverage']:.1f} so far")
    if canary["detection_s"] is not None:
        said.append(f"live bytes within {_time(canary['detection_s'])}")
    return ", ".join(said)


def watch(console: Console, sockets: Sequence[Path], every_s: float, times: int | None) -> None:
    """Shows the status of all processes again and again, until Ctrl-C, until all have ended, or so many ``times``."""
    before: dict[Path, Answer] = {}
    with Live(console=console, screen=times is None and console.is_terminal, auto_refresh=False) as live:
        for answers in _looks(sockets, every_s, times):
            parts = [
                f"[red]{escape(str(a))}[/red]" if isinstance(a, ControlError) else process(a, before.get(path))
                for path, a in answers.items()
            ]
            live.update(Group(*parts), refresh=True)
            before = {path: a for path, a in answers.items() if not isinstance(a, ControlError)}


def print_looks(sockets: Sequence[Path], every_s: float, times: int | None) -> None:
    """The same for programs: one JSON object a line for each look and process."""
    for answers in _looks(sockets, every_s, times):
        for path, answer in answers.items():
            said = {"error": str(answer)} if isinstance(answer, ControlError) else answer
            typer.echo(json.dumps({"socket": str(path), **said}))


def _looks(sockets: Sequence[Path], every_s: float, times: int | None) -> Iterator[dict[Path, "Answer | ControlError"]]:
    number = 0
    while times is None or number < times:
        if number:
            time.sleep(every_s)
        number += 1
        answers = client.ask_all(sockets, Request(command="status"))
        yield answers
        if all(isinstance(answer, ControlError) for answer in answers.values()):
            raise ControlError("no engine answers any more")


def _key(canary: Mapping[str, Any]) -> tuple[object, ...]:
    return canary["model"], canary.get("replica"), canary["rank"], tuple(canary["regions"])


def _rate(canary: Mapping[str, Any], before: Mapping[str, Any] | None, name: str, elapsed_s: float) -> str:
    if before is None or elapsed_s <= 0 or name not in canary:
        return ""
    return f" ({(canary[name] - before.get(name, 0)) / elapsed_s:.0f} a second)"


def _ago(seconds: float | None) -> str:
    return "none yet" if seconds is None else f"{_time(seconds)} ago"


def _time(seconds: float) -> str:
    """``4 ms``, ``1.4 s``, ``25 s``, ``3 min``, ``2.5 h``."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
