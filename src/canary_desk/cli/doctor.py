"""``canary doctor``: would Canary work here, and if not, why."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from canary_desk.cli.common import AsJson, load_config, print_json
from canary_desk.doctor import checks
from canary_desk.doctor.checks import Check

MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "bad": "[bold red]BAD[/bold red]"}


def doctor(
    device: Annotated[
        str | None, typer.Option(help="Where the self-test runs: cpu, cuda, cuda:1.", show_default="a GPU, else cpu")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at GPU, driver, torch and triton, at engines and plugins and why one would not guard its engine, and break a
    toy pool on this device, which must be found. Imports the engines. Exit code 1 if something is bad."""
    config = load_config()
    where = _device(device)
    found: list[Check] = []
    console = Console(stderr=as_json)
    with console.status("") as status:
        parts = {
            "the machine": partial(checks.machine, where),
            "the settings": partial(checks.settings, config),
            "engines and plugins": partial(checks.engines, config),
            "running engines": partial(checks.running, config),
            f"self-test on {where}": partial(checks.tried, where),
        }
        for part, look in parts.items():
            status.update(part)
            found += look()
    bad = sum(check.verdict == "bad" for check in found)
    if as_json:
        print_json([asdict(check) for check in found])
    else:
        _show(console, found)
        console.print(f"{bad} bad" if bad else "[green]nothing is wrong[/green]")
    if bad:
        raise typer.Exit(1)


def _show(console: Console, found: Sequence[Check]) -> None:
    part = None
    table = Table.grid(Column(no_wrap=True), Column(max_width=24), Column(overflow="fold"), padding=(0, 1))
    for check in found:
        if check.part != part:
            table.add_row("", f"[bold]{check.part}[/bold]", "")
            part = check.part
        table.add_row(MARKS[check.verdict], escape(check.what), escape(check.text))
    console.print(table)


def _device(wanted: str | None) -> torch.device:
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        typer.echo(f"canary: there is no device {wanted!r} ({str(error).splitlines()[0]})", err=True)
        raise typer.Exit(2) from error
    return device
