"""Verdicts on requests, printed."""

from collections.abc import Mapping
from pathlib import Path

import typer

from canary_core.errors import ControlError
from canary_desk.cli.common import print_json, refusal_of_all
from canary_desk.control.verify import Verified, only_where_it_runs


def show(
    answers: Mapping[Path, Verified | ControlError], request: str | None, as_json: bool, parked: bool = False
) -> None:
    """Prints the verdicts of each process, then on stderr what is missing; ``parked``: of prefixes. Raises
    `typer.Exit`, unless the KV of each request with a verdict is the same."""
    given = {path: one for path, one in answers.items() if isinstance(one, Verified)}
    if request is not None:
        only_where_it_runs(given.values())
    missing = [str(one) for one in answers.values() if isinstance(one, ControlError)]
    missing += [error for verified in given.values() for error in verified.errors]
    if as_json:
        print_json([_plain(path, one) for path, one in answers.items()])
    else:
        for path, verified in given.items():
            _print(path, verified, "nothing parked is remembered" if parked else "no request runs")
    verdicts = [one["verdict"] for verified in given.values() for one in verified.answers]
    if not missing and not {"same", "differs"} & {*verdicts}:
        missing = [_nothing(request, len(verdicts), parked)]
    end = refusal_of_all(missing)
    if "differs" in verdicts:
        raise typer.Exit(1)
    if end is not None:
        raise end


def _print(path: Path, verified: Verified, nothing: str) -> None:
    from canary_core.watchers.recompute.verification import Verification

    for one in verified.answers:
        typer.echo(f"process {path.stem}, replica {one['replica']}, rank {one['rank']}")
        typer.echo(Verification.from_dict(one).table())
    if not verified.answers and not verified.errors:
        typer.echo(f"process {path.stem}: {nothing}")


def _plain(path: Path, one: Verified | ControlError) -> dict[str, object]:
    if isinstance(one, ControlError):
        return {"socket": str(path), "error": str(one)}
    error = {"error": "; ".join(one.errors)} if one.errors else {}
    return {"socket": str(path), "answers": one.answers, **error}


def _nothing(request: str | None, unjudged: int, parked: bool) -> str:
    prefix, prefixes = ("the prefix of ", "prefixes") if parked else ("", "requests")
    if request is not None:
        return f"there is no verdict on {prefix}request {request!r}; the reason stands beside it"
    if unjudged:
        return f"there is no verdict on any of {unjudged} {prefixes}; the reason stands beside each"
    if parked:
        return "no ended request is remembered that left something in the prefix cache, so nothing was verified"
    return "no request runs, so nothing was verified; ask while requests run"
