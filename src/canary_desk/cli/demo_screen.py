"""Output of ``canary demo``: progress, a line for each part, the table of faults, and the cost."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from canary_core.wording import numbered
from canary_kit.demo import OVERHEAD_REQUESTS, OVERHEAD_ROUNDS, Report, Trial, kinds
from canary_kit.faults.catalogue import FAULTS

LISTED = 3
"""False alarms and troubles shown in full."""

SETTINGS = (
    "Clean traffic and faults: CANARY_READ_CHECK=-1 and CANARY_SCRUB_BUDGET=1GiB, so every byte that a forward reads "
    "is compared before it, and the whole pool after it. By default bytes are compared when the scrub comes round."
)
OVERHEAD = (
    f"Overhead: default settings, medians of {OVERHEAD_ROUNDS} runs each way of up to {OVERHEAD_REQUESTS} requests, in "
    "turn. Forwards of tiny models take milliseconds on a CPU, about as long as Canary's own work, so this share says "
    "nothing of a real model on a GPU."
)


class Screen:
    """Shows the progress of all demos on one bar, and each `Report` when ready."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "Screen":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def progress(self, what: str, finished: int) -> None:
        """A `canary_kit.demo.ShowProgress`."""
        self._bar.update(self._task, description=f"{what:<32}", advance=finished)

    def report(self, report: Report) -> None:
        """Clean traffic, then a line for each fault."""
        say = self._console.print
        clean = report.clean
        same = f"{'bit-identical to' if clean.outputs_identical else 'DIFFERENT from'} those without Canary"
        say(f"[bold]{report.engine}, {report.model}[/bold]")
        say(
            f"  {_mark(clean.passed)} clean traffic: {clean.forwards} forwards, {clean.slots_checked:,} slots and "
            f"{clean.bytes_checked:,} bytes checked, {len(clean.alarms)} violations, outputs {same}",
            highlight=False,
        )
        for line in [*map(str, clean.alarms[:LISTED]), *clean.troubles[:LISTED]]:
            say(f"      [red]{escape(line)}[/red]", highlight=False)
        for trial in report.trials:
            say(f"  {_mark(trial.passed)} [bold]{trial.fault}[/bold]: {escape(_told(trial))}", highlight=False)

    def summary(self, reports: Sequence[Report]) -> None:
        """The table of faults by models, and the overhead."""
        table = Table(Column("fault", no_wrap=True), "what was done", *(f"{r.engine}\n{r.model}" for r in reports))
        for fault in FAULTS:
            trials = [next(t for t in r.trials if t.fault == fault) for r in reports]
            table.add_row(fault, FAULTS[fault].what, *map(_cell, trials))
        table.add_section()
        table.add_row("none", "nothing", *("no alarm" if r.clean.passed else "[red]false alarm[/red]" for r in reports))
        table.add_row("", "overhead", *(f"{r.overhead_pct:+.1f} %" for r in reports))
        self._console.print(table)
        for line in (SETTINGS, OVERHEAD):
            self._console.print(line, highlight=False)


def _mark(passed: bool) -> str:
    return "[green]✓[/green]" if passed else "[red]✗[/red]"


def _cell(trial: Trial) -> str:
    if trial.passed:
        found = ", ".join(kinds(trial.found))
        return escape(f"{found}{f' of {trial.source}' if trial.source else ''}, {_after(trial)}")
    if trial.troubles:
        return "[red]failed[/red]"
    if trial.early:
        return "[red]false alarm[/red]"
    return "[red]missed[/red]" if trial.injection else "[red]not injected[/red]"


def _told(trial: Trial) -> str:
    """The injected fault, and its finding."""
    done = FAULTS[trial.fault].what
    if trial.troubles:
        return f"{done}: FAILED: {trial.troubles[0]}"
    if trial.injection is None:
        return f"{done}: NOT INJECTED, {trial.reason or 'it was never due'}"
    where = trial.injection
    parts = [f"region {where.region}", f"forward {where.step}"]
    if where.source:
        parts.insert(0, where.source)
    done = f"{done} ({', '.join(parts)})"
    if trial.early:
        return f"{done}: FALSE ALARM before it: {trial.early[0]}"
    if not trial.found:
        return f"{done}: MISSED; found instead: {', '.join(kinds(trial.others)) or 'nothing'}"
    also = kinds([v for v in trial.others if v.kind not in {f.kind for f in trial.found}])
    more = f" In consequence: {', '.join(also)}." if also else ""
    return f"{done} → {_after(trial)}, {', '.join(kinds(trial.found))}: {trial.found[0].explanation}{more}"


def _after(trial: Trial) -> str:
    return f"{numbered(trial.steps, 'forward')} later" if trial.steps else "same forward"
