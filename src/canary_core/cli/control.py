"""``canary ctl`` and ``canary top``: what to ask of running engines, and to tell them."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from canary_core.cli import control_screen
from canary_core.cli.common import AsJson, load_config, print_json, refusal
from canary_core.control import client
from canary_core.control.messages import Command, Request
from canary_core.errors import CanaryError, ControlError

Pid = Annotated[int | None, typer.Option("--pid", metavar="PID", help="Only this process; else all of this user's.")]

app = typer.Typer(
    help="Ask a running engine's Canary, or tell it something, over its control socket. Exit code 2 if no engine "
    "answers, or one refuses.",
    no_args_is_help=True,
)


@app.command("status")
def status(pid: Pid = None, as_json: AsJson = False) -> None:
    """What is guarded, what was checked and found, how far the scrub is, and what Canary costs."""
    answers = _ask("status", None, pid)
    if as_json:
        print_json(answers)
    else:
        control_screen.show(Console(), answers)


@app.command("dump")
def dump(pid: Pid = None) -> None:
    """All that the host knows, as JSON: status, settings, versions, coverage and the last events. No tokens."""
    print_json(_ask("dump", None, pid))


@app.command("mode")
def mode(
    value: Annotated[str, typer.Argument(metavar="MODE", help="log or raise.")],
    pid: Pid = None,
    as_json: AsJson = False,
) -> None:
    """Tell findings only (log), or let the next one stop the engine (raise)."""
    _change("mode", value, pid, as_json)


@app.command("budget")
def budget(
    value: Annotated[str, typer.Argument(metavar="BUDGET", help="As CANARY_SCRUB_BUDGET: 1%, 64MiB or 0.")],
    pid: Pid = None,
    as_json: AsJson = False,
) -> None:
    """How much the scrub may do from now on."""
    _change("budget", value, pid, as_json)


@app.command("pause")
def pause(pid: Pid = None, as_json: AsJson = False) -> None:
    """Let forwards run without Canary until `canary ctl resume`. What is in the pool by then is not judged until it is
    written again."""
    _change("pause", None, pid, as_json)


@app.command("resume")
def resume(pid: Pid = None, as_json: AsJson = False) -> None:
    """Undo `canary ctl pause`."""
    _change("resume", None, pid, as_json)


def top(
    pid: Pid = None,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 1.0,
    times: Annotated[int | None, typer.Option("--times", min=1, help="End after so many looks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each look.")] = False,
) -> None:
    """Watch running engines: what is guarded, the pace of the scrub, findings, overhead. Ctrl-C ends it. Exit code 2 if
    no engine answers."""
    try:
        sockets = _sockets(pid)
        if as_json:
            control_screen.print_looks(sockets, every, times)
        else:
            control_screen.watch(Console(), sockets, every, times)
    except KeyboardInterrupt:
        return
    except CanaryError as error:
        raise refusal(error) from error


def _change(command: Command, value: str | None, pid: int | None, as_json: bool) -> None:
    answers = _ask(command, value, pid)
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        typer.echo(f"process {Path(answer['socket']).stem}: {command} {value or ''}".rstrip() + f", {_pools(answer)}")


def _pools(answer: dict[str, Any]) -> str:
    return f"{answer['changed']} pool{'' if answer['changed'] == 1 else 's'}"


def _ask(command: Command, value: str | None, pid: int | None) -> list[dict[str, Any]]:
    try:
        return _ask_all(_sockets(pid), Request(command=command, value=value))
    except CanaryError as error:
        raise refusal(error) from error


def _ask_all(sockets: list[Path], request: Request) -> list[dict[str, Any]]:
    """The answer of each engine. Raises `ControlError` with the first refusal, once all were asked."""
    answers: list[dict[str, Any]] = []
    refused: ControlError | None = None
    for path in sockets:
        try:
            answers.append({"socket": str(path), **client.ask(path, request)})
        except ControlError as error:
            refused = refused or error
    if refused is not None:
        raise refused
    return answers


def _sockets(pid: int | None) -> list[Path]:
    return client.found(load_config().control_folder(), pid)
