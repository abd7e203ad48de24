"""The fleet's groups on the terminal, and as one page."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from canary_core.wording import listed, numbered
from canary_desk.explain.page import template
from canary_desk.fleet.groups import PARTS, Group
from canary_desk.fleet.sightings import Sighting

MOST_VALUES = 3
"""Values of a part that are listed; more are counted."""


def headline(groups: Sequence[Group], sightings: Sequence[Sighting]) -> str:
    """Numbers of incidents, engines and causes."""
    count, engines = sum(g.count for g in groups), {s.engine for s in sightings}
    return f"{numbered(count, 'incident')} on {numbered(len(engines), 'engine')}: {numbered(len(groups), 'cause')}"


def notes(sightings: Sequence[Sighting], wrong: Sequence[str]) -> list[str]:
    """Sentences on what is not in the groups."""
    tests = sum(s.count for s in sightings if s.self_test)
    said = [f"{numbered(tests, 'incident')} of self-tests left out"] if tests else []
    more = [f"and {len(wrong) - MOST_VALUES} more"] if len(wrong) > MOST_VALUES else []
    return [*said, *wrong[:MOST_VALUES], *more]


def about(group: Group) -> list[tuple[str, str]]:
    """Facts of a group, each with its name."""
    facts = [(part, _listed(group, part)) for part in (*PARTS, "engine", "rank")]
    when = group.since if group.since == group.until else f"{group.since} to {group.until}"
    paths = [s.where for s in group.sightings if s.where]
    facts += [
        ("since", when),
        ("requests", str(group.requests) if paths else ""),
        ("look at", f"canary explain {paths[0]}" if paths else ""),
    ]
    return [(name, text) for name, text in facts if text]


def show(console: Console, groups: Sequence[Group], sightings: Sequence[Sighting], wrong: Sequence[str]) -> None:
    """Prints the groups, for 80 columns and more."""
    console.print(Text(headline(groups, sightings), "bold"), "")
    for number, group in enumerate(groups, 1):
        console.print(Text(f"{number}. {group.count} x {group.name}", "bold red"))
        console.print(Text(f"   {group.verdict}", "bold"))
        lines = Table.grid(Column(no_wrap=True, width=18, style="dim"), Column(overflow="fold"))
        for name, text in about(group):
            lines.add_row(f"   {name}", escape(text))
        console.print(lines, "")
    for sentence in notes(sightings, wrong):
        console.print(Text(sentence, "dim"))


def page(groups: Sequence[Group], sightings: Sequence[Sighting], wrong: Sequence[str]) -> str:
    """The same as one self-contained page; all content is escaped."""
    told = headline(groups, sightings)
    shown = template("fleet", "fleet.html.jinja")
    return shown.render(groups=groups, headline=told, notes=notes(sightings, wrong), about=about)


def _listed(group: Group, part: str) -> str:
    values = group.values(part)
    if len(values) == 1 and values[0][1] == group.count:
        return f"{values[0][0]} (all)"
    return listed([f"{value} ({number})" for value, number in values], MOST_VALUES)
