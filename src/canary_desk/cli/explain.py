"""``canary explain``: an incident's bundle as a report, a page, or a check."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from canary_desk.cli.common import Html
from canary_desk.explain import check, page, show, tell
from canary_desk.incidents.bundle import Bundle, BundleError, read_bundle, unlike


def explain(
    bundle: Annotated[Path, typer.Argument(help="The directory that the event diagnosis names as bundle.")],
    html: Html = None,
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
        wrong, told, text = _told(found, repeat, report, html)
        if html is not None and text:
            html.write_text(text, encoding="utf-8")
    except (BundleError, OSError) as error:
        typer.echo(f"canary: {error}", err=True)
        raise typer.Exit(2) from error
    if repeat:
        _check(found, wrong, told)
        return
    typer.echo(told)
    if html is not None and text:
        typer.echo(f"The page is in {html}")


def _told(bundle: Bundle, repeat: bool, report: bool, html: Path | None) -> tuple[list[str], str, str]:
    """All that is said of ``bundle``, before any of it is printed: differences of a repeated check, text, page. Raises
    `BundleError` for a bundle that nothing can be said of: whoever made it may have put anything there."""
    try:
        story = tell(bundle)
        if repeat:
            return check(bundle), story.diagnoses[0].name, ""
        if report:
            return [], story.report, ""
        console = Console()
        with console.capture() as shown:
            show(story, console)
        return [], shown.get().removesuffix("\n"), "" if html is None else page(story)
    except Exception as error:
        raise unlike(bundle.path, error) from error


def _check(bundle: Bundle, wrong: list[str], diagnosis: str) -> None:
    if bundle.evidence is not None and bundle.evidence.words and bundle.evidence.keys is None:
        typer.echo("The bytes were not fingerprinted again: CANARY_KEY_FILE names no secret, or another one.")
    if not wrong:
        typer.echo(f"The bundle alone brings the same: {diagnosis}.")
        return
    for sentence in wrong:
        typer.echo(f"canary: {sentence}", err=True)
    raise typer.Exit(1)
