"""The words of docstrings and pages: names in backticks exist, and sentences name things instead of pointing."""

import re
from pathlib import Path

import pytest
from support import words

LIMIT = 0.04
"""Share of pronouns in the words of a room's docstrings."""
RIDDLE = r"(What|Whoever|Whatever)\b"


def room(file: Path) -> str:
    """The folder of a source file, below canary_core or beside it; a plugin or the adapters are one room."""
    parts = file.parts[file.parts.index("src") + 1 : -1]
    if parts[0] in ("canary_desk", "canary_kit"):
        return "/".join(parts)
    return ("/".join(parts[1:]) or "nouns") if parts[0] == "canary_core" else parts[0]


ROOMS = sorted({room(file) for file in words.SOURCES})


@pytest.mark.parametrize("name", ROOMS)
def test_docstrings_name_only_what_exists(name):
    """Each name between backticks is in the code, in comments too; `Class.member` and `module.member` belong
    together."""
    lost, files = [], [f for f in words.SOURCES if room(f) == name]
    for found in (*words.docstrings(files), *words.comments(files)):
        named = [n for span in words.spans(found.text) for n in words.names(span)]
        lost += [f"{found}: {n}" for n in named if words.code().lacks(n)]
    assert lost == []


@pytest.mark.parametrize("page", words.PAGES, ids=lambda p: str(p.relative_to(words.ROOT)))
def test_pages_name_only_what_exists(page):
    """The same of pages, for what looks like code: dotted, underscored, in camel case, or called."""
    lost = []
    for span in words.spans(page.read_text()):
        looks = [n for n in words.names(span) if re.search(r"[_.]|[a-z][A-Z]", n) or "(" in span]
        lost += [n for n in looks if words.code().lacks(n)]
    assert lost == []


def test_a_name_that_is_gone_is_found():
    """A member of another class, a module's name for what it only imports, and a word from nowhere are no names."""
    named = {"Region.slots", "Region.plan", "launch.TableConstants", "kernels.plan.lookup", "rebound" + "_slots_of"}
    assert {n for n in named if words.code().lacks(n)} == named - {"Region.slots"}


def test_no_docstring_begins_with_what():
    """A docstring says what a thing is or does; it does not announce it."""
    riddles = [str(d) for d in words.docstrings(words.SOURCES) if not d.printed and re.match(RIDDLE, d.text)]
    assert riddles == []


@pytest.mark.parametrize("name", ROOMS)
def test_docstrings_say_nouns(name):
    """At most 4 % of the words in a room's docstrings are pronouns."""
    assert words.pronouns(f for f in words.SOURCES if room(f) == name) <= LIMIT
