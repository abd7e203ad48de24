"""`Page`: the text about a kind in the pages for people; `tests/support/pages.py` writes it there."""

from dataclasses import dataclass
from enum import Enum


class Wrong(Enum):
    """Sorts of kinds by what is wrong: the rows of README.md's table, in its order."""

    READ = "A forward reads the wrong slot"
    NOTHING = "A forward reads a slot that holds nothing"
    BYTES = "The bytes of a slot changed, on any layer, in K, V or a scale"
    WRITE = "A write went wrong"
    ALLOCATOR = "The allocator or the prefix cache made a mistake"
    CACHE = "The prefix cache contradicts itself"
    ARRIVAL = "KV comes back wrong from host memory, a disk, another engine"


@dataclass(frozen=True, slots=True)
class Remedy:
    """A row of docs/runbook.md, for somebody who is woken at night: the usual cause and the next action. ``when``
    follows the kind's name where more than the kind must be seen."""

    usually: str
    do: str
    when: str = ""


ALLOCATOR = Remedy(
    "a bug of the engine's allocator or prefix cache",
    "go back to the engine's last release; turn the prefix cache off; report it with the text of "
    "`canary explain DIR --report`",
)
TABLE = Remedy(
    "a wrong table or a wrong batch, often with speculation or overlap scheduling",
    "turn these off one by one; report it",
)
KERNEL = Remedy("a kernel", "another attention backend; report it")


@dataclass(frozen=True, slots=True)
class Page:
    """``means``, ``causes`` and ``next_steps``: the three parts of the kind's section in docs/findings.md, as Markdown.
    Paragraphs are filled anew there and tables stay as they are; an empty line ends either. ``remedies``: its rows in
    docs/runbook.md, shared with other kinds or its own."""

    wrong: Wrong
    means: str
    causes: str
    next_steps: str
    remedies: tuple[Remedy, ...]
