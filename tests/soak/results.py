"""What a setup came to: a JSON file that is written again and again while it runs, and a row of the table."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COUNTED = ("forwards", "draft_forwards", "checked_slots", "checked_bytes", "recorded_slots", "recorded_bytes")
"""Counters of Canary's that are added up over the setups."""

MOST_FAILURES = 20
"""So many are kept with all their fields; all are counted."""


@dataclass
class Result:
    """``state``: ``starting``, ``serving``, ``done``, or what ended it. ``stats``: Canary's own. ``compared``: requests
    that were answered twice, under guard and while Canary was paused; ``different``: those with other tokens.
    ``failures``: what was found, each with the seed, the round and the command that repeats it. ``noise``: see
    `Noise.rows`."""

    setup: str
    seed: int
    device: str
    version: str = ""
    state: str = "starting"
    start_s: float = 0.0
    traffic_s: float = 0.0
    rounds: int = 0
    requests: int = 0
    tokens: int = 0
    compared: int = 0
    different: int = 0
    violations: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    coverage: list[str] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    noise: dict[str, dict[str, float | None]] = field(default_factory=dict)

    @property
    def left_out(self) -> bool:
        """Whether this machine can't run its engine."""
        return self.state.startswith("left out: ")

    @property
    def good(self) -> bool:
        """Whether it came to its end with forwards and without a failure, or could not be tried here."""
        if self.left_out:
            return True
        return self.state == "done" and not self.failures and not self.violations and self.stats.get("forwards", 0) > 0

    def fail(self, number: int, command: str, what: dict[str, Any]) -> None:
        """One more failure, in that round."""
        if len(self.failures) < MOST_FAILURES:
            self.failures.append({"seed": self.seed, "round": number, "again": command, **what})

    def write(self, path: Path) -> None:
        """The whole of it, at once: whoever reads never sees a part."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), default=str))
        os.replace(part, path)

    @classmethod
    def read(cls, path: Path) -> "Result | None":
        """What was written last."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None


def machine() -> dict[str, Any]:
    """Where this was run."""
    about: dict[str, Any] = {
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    for name in ("torch", "triton"):
        try:
            about[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            about[name] = None
    return about


def totals(results: Sequence[Result]) -> dict[str, float]:
    """Of all setups together."""
    total: dict[str, float] = {name: sum(int(r.stats.get(name, 0)) for r in results) for name in COUNTED}
    for name in ("rounds", "requests", "tokens", "compared", "different", "violations"):
        total[name] = sum(getattr(r, name) for r in results)
    total["failed_setups"] = sum(not r.good for r in results)
    return total


def show(results: Sequence[Result], console: Console) -> None:
    """The table, its totals last."""
    table = Table(title="soak", title_justify="left")
    columns = ("setup", "version", "state", "start s", "traffic s", "rounds", "requests", "forwards", "drafts", "slots",
               "bytes", "unknown", "same", "found", "what happened")  # fmt: skip
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 3 or number == 14 else "right", overflow="fold")
    for r in results:
        happened = " ".join(f"{name}={count}" for name, count in sorted(r.counts.items()) if count)
        table.add_row(
            r.setup, r.version, r.state, f"{r.start_s:.0f}", f"{r.traffic_s:.0f}", str(r.rounds), str(r.requests),
            *(_number(r.stats.get(name, 0)) for name in ("forwards", "draft_forwards", "checked_slots",
                                                         "checked_bytes", "unknown_slots")),
            f"{r.compared - r.different}/{r.compared}" if r.compared else "-", str(r.violations), happened,
            style=None if r.good else "red",
        )  # fmt: skip
    total = totals(results)
    table.add_section()
    table.add_row(
        "all", "", f"{total['failed_setups']:.0f} failed", "", f"{sum(r.traffic_s for r in results):.0f}",
        str(total["rounds"]), str(total["requests"]),
        *(_number(total[name]) for name in ("forwards", "draft_forwards", "checked_slots", "checked_bytes")), "",
        f"{total['compared'] - total['different']}/{total['compared']}", str(total["violations"]), "",
    )  # fmt: skip
    console.print(table)


def _number(value: float) -> str:
    return f"{int(value):,}".replace(",", " ")
