"""Common parts of all commands."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from canary_core.config import CanaryConfig
from canary_core.errors import CanaryError, ControlError

Html = Annotated[Path | None, typer.Option("--html", help="Write the whole as one HTML page to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def load_config() -> CanaryConfig:
    """Settings from the environment; a bad one ends the command with its sentence and exit code 2."""
    with refusing():
        return CanaryConfig.load()


@contextmanager
def refusing() -> Iterator[None]:
    """A `CanaryError` within ends the command with its sentence and exit code 2."""
    try:
        yield
    except CanaryError as error:
        raise refusal(error) from error


def refusal(error: CanaryError) -> typer.Exit:
    """Prints ``error`` on stderr and returns the command's end: exit code 2."""
    typer.echo(f"canary: {error}", err=True)
    return typer.Exit(2)


def refusal_of_all(reasons: Iterable[str]) -> typer.Exit | None:
    """Prints each of ``reasons`` once, as several engines may refuse in the same words; None without any."""
    ends = [refusal(ControlError(reason)) for reason in dict.fromkeys(reasons)]
    return ends[-1] if ends else None


def print_json(value: object) -> None:
    """``value``, indented."""
    typer.echo(json.dumps(value, indent=2, default=str))
