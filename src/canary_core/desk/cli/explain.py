"""``canary explain``: an incident's bundle as a report, a page, or a check."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from canary_core.desk.explain import check, page, show, tell
from canary_core.desk.incidents.bundle import BundleError, read_bundle


def explain(
    bundle: Annotated[Path, typer.Argument(help="The directory that the event diagnosis names as bundle.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write the whole as one HTML page to this file.")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print only the text for the engine's tracker, without names and tokens.")
    ] = False,
    repeat: Annotated[
        bool,
        typer.Option("--check", help="Repeat check and diagnosis on the bundle alone; exit code 1 if they differ."),
    ] = False,
) -> None:
    """Explain an incident by its bundle (see CANARY_INCIDENT_DIR). Exit code 2 if it is none, or not whole."""
    try:
        found = read_bundle(bundle)
        story = tell(found)
        if repeat:
            _check(check(found), story.diagnoses[0].name)
        elif report:
            typer.echo(story.report)
        else:
            if html is not None:
                html.write_text(page(story), encoding="utf-8")
            show(story, Console())
            if html is not None:
                typer.echo(f"The page is in {html}")
    except (BundleError, OSError) as error:
        typer.echo(f"canary: {error}", err=True)
        raise typer.Exit(2) from error


def _check(wrong: list[str], diagnosis: str) -> None:
    if not wrong:
        typer.echo(f"The bundle alone brings the same: {diagnosis}.")
        return
    for sentence in wrong:
        typer.echo(f"canary: {sentence}", err=True)
    raise typer.Exit(1)
