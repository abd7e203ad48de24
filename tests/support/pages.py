"""The parts of pages that are made from the files of kinds, between ``<!-- kinds -->`` and ``<!-- /kinds -->``.

PYTHONPATH=src:tests python -m support.pages     writes them into the pages
"""

import inspect
import re
import textwrap
from pathlib import Path

from canary_core import Kind
from canary_core.kinds import registry
from canary_core.kinds.finding_kind import FindingKind, Remedy, Wrong

ROOT = Path(__file__).parents[2]
KINDS = [registry.of(kind) for kind in Kind]
"""In the order of their numbers."""


def sections() -> str:
    """A section for each kind, of docs/findings.md."""
    return "".join(_section(kind) for kind in KINDS) + "\n"


def _section(kind: FindingKind) -> str:
    page = kind.page
    parts = {"What it means.": page.means, "Usual causes.": page.causes, "What to do next.": page.next_steps}
    return f"\n## {kind.name}\n\n" + "\n".join(_filled(f"**{title}** ", text) for title, text in parts.items())


def _filled(title: str, text: str) -> str:
    paragraphs = f"{title}{inspect.cleandoc(text)}".split("\n\n")
    return "\n".join(f"{p if p.startswith('|') else _lines(p)}\n" for p in paragraphs)


def _lines(paragraph: str) -> str:
    return textwrap.fill(" ".join(paragraph.split()), 120, break_long_words=False, break_on_hyphens=False)


def consequences() -> str:
    """The table of docs/incidents.md: which kind follows from which."""
    rows = ["| cause | may bring, if they share it |", "|---|---|"]
    for cause in registry.load().values():
        told = (f"{k.name.lower()} ({', '.join(sorted(n.value for n in links))})" for k, links in cause.brings.items())
        rows.append(f"| `{cause.name}` | {'; '.join(told)} |")
    return "\n".join(rows) + "\n"


def remedies() -> str:
    """The table of docs/runbook.md, kinds with the same remedy in one row: first rows that ask for more than the kind,
    then the others from causes to effects."""
    rows: dict[Remedy, list[str]] = {}
    for kind in sorted(registry.load().values(), key=lambda kind: not any(r.when for r in kind.page.remedies)):
        for remedy in kind.page.remedies:
            rows.setdefault(remedy, []).append(f"`{kind.name}`")
    lines = ["| what you see | what it usually is | what to do |", "|---|---|---|"]
    for remedy, names in rows.items():
        lines.append(f"| {', '.join(names)}{remedy.when} | {remedy.usually} | {remedy.do} |")
    return "\n".join(lines) + "\n"


def what_it_finds() -> str:
    """The table of README.md: kinds by what is wrong."""
    rows = ["| what is wrong | findings |", "|---|---|"]
    for wrong in Wrong:
        names = ", ".join(f"`{kind.name}`" for kind in KINDS if kind.page.wrong is wrong)
        rows.append(f"| {wrong.value} | {names} |")
    return "\n".join(rows) + "\n"


PARTS = {
    "README.md": what_it_finds,
    "docs/findings.md": sections,
    "docs/incidents.md": consequences,
    "docs/runbook.md": remedies,
}
"""Pages, and what makes their part."""


def text(page: str) -> str:
    """The whole page, as it should be."""
    found = (ROOT / page).read_text()
    before, start, rest = re.split(r"(<!-- kinds -->\n)", found)
    _, end, after = re.split(r"(<!-- /kinds -->)", rest)
    return before + start + PARTS[page]() + end + after


if __name__ == "__main__":
    for page in PARTS:
        (ROOT / page).write_text(text(page))
