"""``canary fleet``: the incidents of many engines, grouped by probable cause."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from canary_core.errors import CanaryError
from canary_desk.cli.common import Html, refusal
from canary_desk.fleet import sightings, view
from canary_desk.fleet.groups import groups


def fleet(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR...", help="Folders of bundles (CANARY_INCIDENT_DIR), or folders of such folders."),
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option("--prometheus", metavar="URL", help="Ask this Prometheus server instead.")
    ] = None,
    html: Html = None,
) -> None:
    """Group the incidents of many engines: the same GPU again, the same layer, store or release; since when, how many
    requests. Exit code 2 if there is nothing to read."""
    try:
        if not folders and prometheus is None:
            raise CanaryError("give folders of bundles, or --prometheus URL")
        found, wrong = sightings.of_bundles(folders or [])
        if prometheus is not None:
            found += sightings.of_prometheus(prometheus)
        grouped = groups(found)
        if html is not None:
            html.write_text(view.page(grouped, found, wrong), encoding="utf-8")
    except CanaryError as error:
        raise refusal(error) from error
    except OSError as error:
        raise refusal(CanaryError(str(error))) from error
    view.show(Console(), grouped, found, wrong)
    if html is not None:
        typer.echo(f"The page is in {html}")
