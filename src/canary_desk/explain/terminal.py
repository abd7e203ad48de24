"""`show`: a story on the terminal."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from canary_desk.explain.story import Heat, Story

COLOURS = {"certain": "bold red", "likely": "bold yellow", "possible": "bold cyan"}

MOST_SLOTS = 12
"""Slots of the table."""

MOST_LAYERS = 48
"""Rows of the heat map; more are left to the page."""


_CELLS = {"x": ("█", "red"), "l": ("▒", "magenta"), ".": ("·", "dim")}
"""Cells of the heat map."""


def show(story: Story, console: Console) -> None:
    """Prints ``story``, for 80 columns and more."""
    diagnosis = story.diagnoses[0]
    test = story.self_test.replace("self-test", "SELF-TEST", 1)
    about: list[RenderableType] = [Text(test, "bold magenta"), Text("")] if test else []
    about += [Text(diagnosis.sentence, COLOURS[diagnosis.sure]), Text(story.headline), Text("")]
    about.append(_listed(diagnosis.evidence))
    if len(story.diagnoses) > 1:
        others = ", ".join(f"{d.name} ({d.sure})" for d in story.diagnoses[1:])
        about += [Text(""), Text(f"Also possible: {others}")]
    console.print(Panel(Group(*about), title=escape(story.name), title_align="left"))
    _say(console, "Answers", story.answers)
    _say(console, "Where", story.where)
    _say(console, "When", story.when)
    if story.ranks:
        _say(console, "Ranks", story.ranks)
    console.print()
    console.print(Text("What to do next", "bold"))
    console.print(_listed(story.to_do), "")
    followed = ", ".join(f"{kind} {number}" for kind, number in story.kinds.items())
    grew = ", ".join(f"{kind} {number}" for kind, number in story.grew.items())
    _say(console, "Findings", followed + (f"; a moment later: {grew}" if grew else ""))
    if diagnosis.bugs:
        _say(console, "Resembles", ", ".join(diagnosis.bugs))
    _say(console, "Signature", story.signature)
    console.print()
    _affected(story, console)
    _timeline(story, console)
    if story.heat is not None:
        _heat(story.heat, console)
    _numbers(story, console)
    _slots(story, console)
    _say(console, "Versions", ", ".join(f"{name} {version}" for name, version in story.versions.items()))
    settings = ", ".join(f"{name}={value}" for name, value in story.changed_settings.items())
    _say(console, "Settings", settings or "all as by default")
    _say(console, "Repeat", story.command)


def _listed(sentences: Sequence[str]) -> Table:
    """One below the other, each with a dash."""
    lines = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 1))
    for sentence in sentences:
        lines.add_row(" -", Text(sentence))
    return lines


def _say(console: Console, name: str, text: str) -> None:
    line = Table.grid(Column(no_wrap=True, style="bold", width=10), Column(overflow="fold"))
    line.add_row(name, escape(text))
    console.print(line)


def _affected(story: Story, console: Console) -> None:
    if not story.affected:
        return
    table = Table(
        Column("request", overflow="fold"),
        Column("its part", overflow="fold"),
        Column("its answer", overflow="fold"),
        box=None,
    )
    for row in story.affected[:MOST_SLOTS]:
        trace = f" (trace {row.trace})" if row.trace else ""
        table.add_row(escape(f"{row.request}{trace}"), escape(row.part), Text(row.answer, "red" if row.retract else ""))
    console.print(Text("Whose answers", "bold"))
    console.print(table, "")


def _timeline(story: Story, console: Console) -> None:
    if not story.timeline:
        return
    styles = {"finding": "red", "write": "green", "free": "yellow"}
    table = Table(
        Column("", justify="right"),
        Column("UTC", overflow="fold"),
        Column("the slot's life", overflow="fold"),
        box=None,
    )
    for moment, clock in zip(story.timeline, story.clock, strict=True):
        table.add_row(moment.when, clock, Text(moment.text, styles.get(moment.sort, "")))
    console.print(table, "")


def _heat(heat: Heat, console: Console) -> None:
    """A row for each source; slots as columns, as many as fit."""
    widest = max((len(name) for name, _ in heat.rows), default=0)
    room = max(4, console.width - widest - 4)
    damaged = [i for i in range(len(heat.slots)) if any(cells[i] in "xl" for _, cells in heat.rows)]
    if not damaged:
        return
    console.print(Text("Which layer differs in which slot", "bold"))
    shown = heat.rows[:MOST_LAYERS]
    for name, cells in shown:
        line = Text(f"  {name:<{widest}} ")
        for letter in cells[:room]:
            line.append(*_CELLS.get(letter, (letter, "dim")))
        console.print(line)
    first, last = heat.slots[0], heat.slots[min(len(heat.slots), room) - 1]
    left_out = len(heat.rows) - len(shown)
    more = f"; {left_out} more rows are on the page" if left_out else ""
    console.print(
        Text(f"  slots {first} to {last}: █ differs, ▒ not written, · as recorded, ? not known{more}", "dim"), ""
    )


def _numbers(story: Story, console: Console) -> None:
    if not story.numbers and not story.shapes:
        return
    console.print(Text("What the bytes look like", "bold"))
    console.print(_listed(story.shapes))
    known = [number for number in story.numbers if number.before]
    if known:
        table = Table("slot", "source", "element", "before", "after", box=None)
        for number in known[:MOST_SLOTS]:
            before, after = f"{number.before} {number.before_hex}", f"{number.after} {number.after_hex}"
            table.add_row(str(number.slot), number.source, str(number.element), before, after)
        console.print(table)
    console.print()


def _slots(story: Story, console: Console) -> None:
    if not story.slots:
        return
    console.print(Text("Who wrote what", "bold"))
    table = Table("slot", "state", "position", "writer", "step", "let go of", "differs", box=None)
    for row in story.slots[:MOST_SLOTS]:
        cells = (str(row.slot), row.state, row.position, row.writer, row.step_written, row.freed, row.differs)
        table.add_row(*(escape(cell) for cell in cells))
    console.print(table)
    left_out = len(story.slots) - MOST_SLOTS
    if left_out > 0:
        console.print(Text(f"  and {left_out} more slots, on the page", "dim"))
    console.print()
