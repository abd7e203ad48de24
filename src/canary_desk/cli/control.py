"""``canary ctl`` and ``canary top``: questions and commands to running engines."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from canary_core.errors import ControlError
from canary_core.wording import numbered
from canary_desk.cli import control_screen, verify_screen
from canary_desk.cli.common import AsJson, load_config, print_json, refusal_of_all, refusing
from canary_desk.control import client
from canary_desk.control import verify as verifying
from canary_desk.control.messages import Command, Request

Answers = dict[Path, client.Answer | ControlError]

Pid = Annotated[int | None, typer.Option("--pid", metavar="PID", help="Only this process; else all of this user's.")]

app = typer.Typer(
    help="Ask a running engine's Canary, or tell it something, over its control socket. Exit code 2 if no engine "
    "answers, or one does not or refuses; the others' answers are printed all the same.",
    no_args_is_help=True,
)


@app.command("status")
def status(pid: Pid = None, as_json: AsJson = False) -> None:
    """What is guarded, what was checked and found, how far the scrub is, and what Canary costs."""
    with _asked("status", None, pid) as answers:
        if as_json:
            print_json(_listed(answers))
        else:
            control_screen.show(Console(), _given(answers))


@app.command("dump")
def dump(pid: Pid = None) -> None:
    """All that the host knows, as JSON: status, settings, versions, coverage and the last events."""
    with _asked("dump", None, pid) as answers:
        print_json(_listed(answers))


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


@app.command("ack")
def ack(
    signature: Annotated[
        str, typer.Argument(metavar="SIGNATURE", help="Field signature, or signature_id, of a diagnosis event.")
    ],
    pid: Pid = None,
    as_json: AsJson = False,
) -> None:
    """Acknowledge a known incident: from now on those of its signature notify nobody and stop nothing, until the engine
    ends; CANARY_SUPPRESSIONS does so for good."""
    _change("ack", signature, pid, as_json)


@app.command("verify")
def verify(  # noqa: PLR0913  (the options of a command)
    request: Annotated[str | None, typer.Option("--request", metavar="ID", help="A running request.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All that run, in each engine.")] = False,
    prefix_of: Annotated[
        str | None, typer.Option("--prefix-of", metavar="ID", help="What an ended request left in the prefix cache.")
    ] = None,
    every_parked: Annotated[bool, typer.Option("--all-parked", help="All such prefixes that are remembered.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="S", help="Longest wait, in seconds.")
    ] = 60.0,
    pid: Pid = None,
    as_json: AsJson = False,
) -> None:
    """Is the KV of running requests, or what ended ones left in the prefix cache, what the model computes? The engine
    computes it a second time, between forwards or beside them, and compares: see docs/verify.md. Exit code 1 if the KV
    of a request differs; else 2 if no request got a verdict, or an engine did not answer."""
    parked = every_parked or prefix_of is not None
    with refusing():
        if [request is not None, every, prefix_of is not None, every_parked].count(True) != 1:
            raise ControlError(
                "name a request with --request ID, or have all that run verified with --all; for what ended requests "
                "left in the prefix cache, --prefix-of ID or --all-parked"
            )
        asked = prefix_of if parked else request
        answers = verifying.verify(_sockets(pid), asked, timeout_s, parked)
    verify_screen.show(answers, asked, as_json, parked)


def top(
    pid: Pid = None,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 1.0,
    times: Annotated[int | None, typer.Option("--times", min=1, help="End after so many looks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each look.")] = False,
) -> None:
    """Watch running engines: what is guarded, the pace of the scrub, findings, overhead. Ctrl-C ends it. Exit code 2 if
    no engine answers."""
    with contextlib.suppress(KeyboardInterrupt), refusing():
        sockets = _sockets(pid)
        if as_json:
            control_screen.print_looks(sockets, every, times)
        else:
            control_screen.watch(Console(), sockets, every, times)


def _change(command: Command, value: str | None, pid: int | None, as_json: bool) -> None:
    with _asked(command, value, pid) as answers:
        if as_json:
            print_json(_listed(answers))
            return
        for path, answer in answers.items():
            if not isinstance(answer, ControlError):
                said = f"process {path.stem}: {command} {value or ''}".rstrip()
                typer.echo(f"{said}, {numbered(answer['changed'], 'pool')}")


@contextlib.contextmanager
def _asked(command: Command, value: str | None, pid: int | None) -> Iterator[Answers]:
    """Answers of the engines, or why there is none. After the block each such reason is printed on stderr, and the
    command ends with exit code 2."""
    with refusing():
        answers = client.ask_all(_sockets(pid), Request(command=command, value=value))
    yield answers
    end = refusal_of_all(str(answer) for answer in answers.values() if isinstance(answer, ControlError))
    if end is not None:
        raise end


def _given(answers: Answers) -> list[client.Answer]:
    return [answer for answer in answers.values() if not isinstance(answer, ControlError)]


def _listed(answers: Answers) -> list[dict[str, Any]]:
    """For programs: an object for each engine, with ``error`` in place of a missing answer."""
    return [
        {"socket": str(path), **({"error": str(answer)} if isinstance(answer, ControlError) else answer)}
        for path, answer in answers.items()
    ]


def _sockets(pid: int | None) -> list[Path]:
    return client.found(load_config().control_folder(), pid)
