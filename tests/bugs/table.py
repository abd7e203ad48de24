"""Writes docs/bugs.md from what the bugs declare: ``PYTHONPATH=src:tests python -m bugs.table > docs/bugs.md``.

Starts no engine: that what is declared is true is what the runs show.
"""

import sys
from collections.abc import Iterator

from bugs import museum
from bugs.classes import CLASSES, NOT_HERE
from bugs.kinds import KINDS
from bugs.museum import ENGINES, Bug, Found, Missed

HEAD = """# Real bugs, and what Canary says of them

Each row is the mechanism of a public bug, patched into the real engine from outside; a file each in
[tests/bugs](../tests/bugs). There is no fault injector and no test double: functions of the engine are replaced, so
that it does what it did when it had the bug. `make bugs` runs all of them, CI most of them. A run fails if the engine
is not silent before it is broken, if the broken function never runs, if the first finding is another one than the row
says, or later, and if something is found that the row says is missed.

- **found as**: the kind of the first finding, and how many forwards after the bug's first effect at most.
- **sentence**: what the first finding says; ... is what differs from run to run. Alice, Bob and Carol are requests.
- **default**: with no setting but `CANARY_PLUGINS`. **thorough**: with `CANARY_PROFILE=hunt`.

The issues are those that the mechanism resembles; we do not claim that each of them is this very bug.

"""


def page() -> str:
    """All of docs/bugs.md."""
    bugs = [(engine, name, museum.bug(engine, name)) for engine in ENGINES for name in museum.names(engine)]
    live = [(name.partition("_")[0], name, museum.bug("live", name)) for name in museum.names("live")]
    parts = (_summary(bugs), _rows(bugs), _live(live), _kinds(), _missed(bugs + live), _left_out())
    return HEAD + "\n\n".join("\n".join(part) for part in parts) + "\n"


def _summary(bugs: list[tuple[str, str, Bug]]) -> Iterator[str]:
    yield "| engine | bugs | found by default | found when thorough |"
    yield "|---|---|---|---|"
    for engine, title in [*ENGINES.items(), ("", "all")]:
        own = [bug for of, _, bug in bugs if engine in ("", of)]
        found = [sum(isinstance(bug.expected(profile), Found) for bug in own) for profile in museum.PROFILES]
        yield f"| {title} | {len(own)} | {found[0]} | {found[1]} |"


def _rows(bugs: list[tuple[str, str, Bug]]) -> Iterator[str]:
    yield "| class | bug | public issues | found as | sentence | default | thorough |"
    yield "|---|---|---|---|---|---|---|"
    for row in CLASSES:
        for engine, name, bug in bugs:
            if bug.row == row:
                link = f"[{bug.title}](../tests/bugs/{engine}/{name}.py) ({ENGINES[engine]})"
                yield f"| {' | '.join((row, link, *_outcome(bug)))} |"


def _outcome(bug: Bug) -> tuple[str, ...]:
    """Issues, found as, sentence, default, thorough."""
    default, thorough = (bug.expected(profile) for profile in museum.PROFILES)
    found = [one for one in dict.fromkeys((default, thorough)) if isinstance(one, Found)]
    kinds = ", ".join(dict.fromkeys(f"`{one.kind}`" for one in found)) or "nothing"
    sentences = "; thorough: ".join(dict.fromkeys(one.sentence for one in found))
    return (", ".join(bug.issues), kinds, sentences, _when(default), _when(thorough))


def _live(bugs: list[tuple[str, str, Bug]]) -> Iterator[str]:
    yield "## Live bugs"
    yield ""
    yield "Nothing of the engine is replaced: the release named has the bug, or its own API allows the mistake."
    yield "`make bugs-live` runs those of the installed releases ([tests/bugs/live](../tests/bugs/live/README.md))."
    yield "Which of them Canary found by itself is told in [found.md](found.md)."
    yield ""
    yield "| bug | releases | public issues | found as | sentence | default | thorough |"
    yield "|---|---|---|---|---|---|---|"
    for engine, name, bug in bugs:
        link = f"[{bug.title}](../tests/bugs/live/{name}.py) ({ENGINES[engine]})"
        releases = ", beside ".join(filter(None, (bug.releases or "all that were run", bug.beside)))
        yield f"| {' | '.join((link, releases, *_outcome(bug)))} |"


def _kinds() -> Iterator[str]:
    yield "## Kinds that were tried from outside"
    yield ""
    yield "Of these nothing or little was found when they were tried first. Entries have the rest in the tables above."
    yield ""
    yield "| kind | entry | default | thorough |"
    yield "|---|---|---|---|"
    for kind, entries in KINDS.items():
        if isinstance(entries, str):
            yield f"| {kind} | none: {entries} | | |"
            continue
        for entry in entries:
            folder, _, name = entry.partition("/")
            bug = museum.bug(folder, name)
            default, thorough = (_briefly(bug.expected(profile)) for profile in museum.PROFILES)
            yield f"| {kind} | [{bug.title}](../tests/bugs/{entry}.py) | {default} | {thorough} |"


def _briefly(expected: Found | Missed) -> str:
    return "missed" if isinstance(expected, Missed) else f"`{expected.kind}`, {_when(expected)}"


def _when(expected: Found | Missed) -> str:
    if isinstance(expected, Missed):
        return "missed"
    return "at once" if expected.within == 0 else f"within {expected.within} forward{'s' * (expected.within > 1)}"


def _missed(bugs: list[tuple[str, str, Bug]]) -> Iterator[str]:
    yield "## What is missed, and why"
    yield ""
    yield "| bug | with | reason |"
    yield "|---|---|---|"
    for engine, _, bug in bugs:
        outcomes = {profile: bug.expected(profile) for profile in museum.PROFILES}
        missed = {profile: one for profile, one in outcomes.items() if isinstance(one, Missed)}
        if missed:
            settings = "any settings" if len(missed) == 2 else f"{next(iter(missed))} settings"
            yield f"| {bug.title} ({ENGINES[engine]}) | {settings} | {next(iter(missed.values())).why} |"
    pointed = [(engine, bug, e) for engine, _, bug in bugs for e in {bug.expected(p) for p in museum.PROFILES}]
    wrong = [(e, b, found.wrong) for e, b, found in pointed if isinstance(found, Found) and found.wrong]
    if wrong:
        yield ""
        yield "Found, with a sentence that points elsewhere:"
        yield ""
        for engine, bug, why in wrong:
            yield f"- {bug.title} ({ENGINES[engine]}): {why}."


def _left_out() -> Iterator[str]:
    yield "## Classes without a row"
    yield ""
    for row, why in NOT_HERE.items():
        yield f"- {row} ({CLASSES[row]}): {why}."


if __name__ == "__main__":
    sys.stdout.write(page())
