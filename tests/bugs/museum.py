"""What a bug of the museum declares, how it runs, and what its outcome is held against.

A bug is the mechanism of a public one: functions of the engine are replaced from outside, by `patched`, beneath
whatever hooks Canary has around them, so that the engine behaves as if its own code were wrong. Nothing of Canary's is
replaced, and its fault injector has no part in it.
"""

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
ENGINES = {"sglang": "SGLang", "transformers": "Transformers", "vllm": "vLLM"}
PROFILES = {"default": "watch", "thorough": "hunt"}
"""``CANARY_PROFILE`` of the two columns of the table."""

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """``kind``: that of the first finding. ``within``: so many forwards, at most, after the first one in which the bug
    did something. ``sentence``: what the first finding must say, with ... for what differs from run to run. ``wrong``:
    in what the sentence points the wrong way, if it does."""

    kind: str
    within: int
    sentence: str
    wrong: str = ""


@dataclass(frozen=True)
class Missed:
    """Nothing is found. ``why``: the reason."""

    why: str


class Stage(ABC):
    """An engine under guard that a bug runs on. Requests are named as a bug's sentence has them; while the traffic is
    still clean their names begin with ``clean-``.

    ``struck``: how many forwards there were when the bug first did something; None while it has not.
    """

    def __init__(self) -> None:
        self.struck: int | None = None
        self.phase = ""

    @property
    @abstractmethod
    def forwards(self) -> int:
        """How many forwards were guarded so far."""

    @abstractmethod
    def findings(self) -> list[Any]:
        """The `Violation`s since the last call, oldest first, after everything was waited for."""

    def submit(self, name: str, tokens: Sequence[int], new_tokens: int) -> None:
        """Queues a request. Of engines that have requests."""
        raise NotImplementedError

    def step(self) -> bool:
        """One forward; False if there is nothing to do."""
        raise NotImplementedError

    def answered(self, name: str) -> int:
        """How many tokens the request has generated."""
        raise NotImplementedError

    def answers(self) -> dict[str, list[int]]:
        """What the requests of this phase have generated, by name. Of engines that have requests."""
        return {}

    def strike(self) -> None:
        """Called by a bug whenever it does what it must not."""
        if self.struck is None:
            self.struck = self.forwards

    def tokens(self, of: str, count: int) -> list[int]:
        """Random tokens, the same ones for ``of`` within the clean traffic and within the other."""
        draw = Random(f"{self.phase} {of}")
        return [draw.randrange(3, 250) for _ in range(count)]


@dataclass(frozen=True)
class Bug:
    """One exhibit.

    cause: the root cause in a plain sentence. row: its row in `classes.CLASSES`. issues: public ones that it resembles.
    setup: the name of the stage that it runs on. broken: replaces functions of the engine for as long as the context
    lasts, and calls `Stage.strike` where they go wrong. traffic: what is served, first in a sound engine, where it must
    raise nothing, then in the broken one. default, thorough: what must come of it under ``CANARY_PROFILE=watch`` and
    under ``hunt``; without ``thorough`` the same. slow: not among those that CI runs. releases: of a live bug, those of
    the engine that have it, as a version specifier of PEP 440; empty for all. beside: what else must be installed for
    it, as a requirement of PEP 508.
    """

    title: str
    cause: str
    row: str
    issues: tuple[str, ...]
    setup: str
    broken: Callable[[Any], AbstractContextManager[None]]
    traffic: Callable[[Any], None]
    default: Found | Missed
    thorough: Found | Missed | None = None
    slow: bool = False
    releases: str = ""
    beside: str = ""

    def expected(self, profile: str) -> Found | Missed:
        """By the column of the table: ``default`` or ``thorough``."""
        return self.thorough if profile == "thorough" and self.thorough is not None else self.default


def names(engine: str) -> list[str]:
    """All bugs of an engine of `ENGINES`: the names of their files."""
    return sorted(f.stem for f in (HERE / engine).glob("*.py") if not f.stem.startswith(("_", "test_")))


def bug(engine: str, name: str) -> Bug:
    """That of a file; of another folder than the engine's where ``name`` says so, as in ``live.sglang_weights_kept``.
    Imports no engine."""
    found: Bug = importlib.import_module(f"bugs.{name}" if "." in name else f"bugs.{engine}.{name}").BUG
    return found


def elsewhere(engine: str, bug: Bug) -> str:
    """The reason why the installed release of an engine of `ENGINES` can't show a live bug; empty if it can."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    release = installed(engine) or "0"
    if bug.releases and release not in SpecifierSet(bug.releases):
        return f"{ENGINES[engine]} {release} is installed; {bug.releases} has this bug"
    if bug.beside:
        wanted = Requirement(bug.beside)
        there = next((d.version for d in metadata.distributions(name=wanted.name)), None)
        if there is None or there not in wanted.specifier:
            return f"lacks {bug.beside}, which has this bug ({there} is installed): see tests/bugs/live/README.md"
    return ""


def installed(engine: str) -> str | None:
    """The installed release of an engine of `ENGINES`, None without one. A folder of that name is none."""
    found = (d.version for name in (engine, f"{engine}-cpu") for d in metadata.distributions(name=name))
    return next(found, None)


def run(bug: Bug, stage: Stage, sound: bool = False) -> Outcome:
    """The clean traffic, then the same in the broken engine, or with ``sound`` in a sound one: what was found before
    (``clean``) and after (``found``), how many forwards there had been when the bug first struck (None: never), the
    engine's own exception, if it ended with one, and its answers."""
    stage.phase = "clean-"
    bug.traffic(stage)
    clean = [_told(v) for v in stage.findings()]
    stage.phase = ""
    error = ""
    try:
        with nullcontext() if sound else bug.broken(stage):
            bug.traffic(stage)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    found = [_told(v) for v in stage.findings()]
    about = {"struck": stage.struck, "forwards": stage.forwards, "error": error, "answers": stage.answers()}
    return {"clean": clean, "found": found, **about}


def problem(expected: Found | Missed, outcome: Outcome) -> str:
    """What the outcome has against what was declared; empty if it is as declared."""
    if outcome["clean"]:
        return f"the engine was not sound before it was broken: {outcome['clean'][0]['sentence']}"
    if outcome["struck"] is None:
        return f"the broken function never ran. The engine ended with: {outcome['error'] or 'all requests served'}"
    found = outcome["found"]
    if isinstance(expected, Missed):
        return f"now found: change its entry. {_line(outcome)}" if found else ""
    if not found:
        ended = f"; the engine ended with {outcome['error']}" if outcome["error"] else ""
        return f"nothing was found in {outcome['forwards'] - outcome['struck']} forwards{ended}"
    pieces = [re.escape(piece.strip()) for piece in expected.sentence.split("...")]
    first = found[0]
    said = re.search(".*".join(pieces), first["sentence"])
    if first["kind"] != expected.kind or not said or first["step"] - outcome["struck"] > expected.within:
        return f"found otherwise than declared ({expected}): {_line(outcome)}"
    return ""


def _line(outcome: Outcome) -> str:
    first = outcome["found"][0]
    return f"{first['kind']} after {first['step'] - outcome['struck']} forwards: {first['sentence']}"


def _told(violation: Any) -> dict[str, Any]:
    fields = violation.fields()
    return {"kind": fields["kind"], "step": fields["step"], "sentence": violation.explanation}


@contextmanager
def patched(owner: Any, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function of a class, an object or a module: ``wrong`` is called with the engine's own one and the
    arguments. What others have wrapped around the engine's function, Canary's hooks among them, stays around it."""
    inherited = not isinstance(owner, type) and name not in vars(owner)
    raw = getattr(owner, name) if inherited else vars(owner)[name]
    static = isinstance(raw, staticmethod)
    outer = raw.__func__ if static else raw
    cell, own = (None, raw) if inherited else _innermost(outer)

    def broken(*args: Any, **kwargs: Any) -> Any:
        return wrong(own, *args, **kwargs)

    if cell is not None:
        cell.cell_contents = broken
        try:
            yield
        finally:
            cell.cell_contents = own
        return
    setattr(owner, name, staticmethod(broken) if static else broken)
    try:
        yield
    finally:
        delattr(owner, name) if inherited else setattr(owner, name, raw)


def _innermost(function: Any) -> tuple[Any, Any]:
    """The engine's own function beneath its wrappers, and the closure's cell in which its last wrapper has it; None
    where nobody wraps it."""
    cell = None
    while hasattr(function, "__wrapped__"):
        inner = function.__wrapped__
        holders = [c for c in function.__closure__ or () if c.cell_contents is inner]
        if not holders:
            break
        cell, function = holders[0], inner
    return cell, function
