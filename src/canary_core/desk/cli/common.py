"""Common parts of all commands."""

import json
from typing import Annotated

import typer

from canary_core.config import CanaryConfig
from canary_core.errors import CanaryError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def load_config() -> CanaryConfig:
    """Settings from the environment; a bad one ends the command with its sentence and exit code 2."""
    try:
        return CanaryConfig.load()
    except CanaryError as error:
        raise refusal(error) from error


def refusal(error: CanaryError) -> typer.Exit:
    """Prints ``error`` on stderr and returns the command's end: exit code 2."""
    typer.echo(f"canary: {error}", err=True)
    return typer.Exit(2)


def print_json(value: object) -> None:
    """``value``, indented."""
    typer.echo(json.dumps(value, indent=2, default=str))
