"""Runs a suite without pytest, for ``canary check-plugin`` and the support matrix."""

import inspect
import time
import traceback
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from canary_core.errors import error_text
from canary_kit.conformance.problems import Nonconforming
from canary_kit.conformance.session import Ability
from canary_kit.conformance.suite import PluginConformance
from canary_kit.quiet import one_thread

Result = Literal["passed", "failed", "undeclared"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one test of the suite. ``ability``: the tested one, None where every plugin must pass. ``message``: why
    the test failed, or that the ability is not declared; ``error``: the traceback of an exception other than
    `Nonconforming`, None otherwise."""

    test: str
    what: str
    ability: Ability | None
    result: Result
    seconds: float
    message: str = ""
    error: str | None = None

    def fields(self) -> dict[str, object]:
        """As in ``canary check-plugin --json``."""
        return {
            "test": self.test,
            "what": self.what,
            "ability": self.ability,
            "result": self.result,
            "seconds": round(self.seconds, 2),
            "message": self.message,
        }


def suite_tests(suite: type[PluginConformance]) -> tuple[str, ...]:
    """Names of the suite's tests, in the order written; a subclass's own come last."""
    names: dict[str, None] = {}
    for base in reversed(suite.__mro__):
        names.update((name, None) for name, value in vars(base).items() if name.startswith("test_") and callable(value))
    return tuple(names)


def run_suite(
    suite: type[PluginConformance], tests: Sequence[str] = (), started: Callable[[str], None] = lambda what: None
) -> Iterator[Outcome]:
    """Runs ``tests`` of ``suite``, all of them by default, one after the other. ``started`` gets the subject of each.
    Never raises because of a test."""
    for name in tests or suite_tests(suite):
        test = getattr(suite, name)
        what = (inspect.getdoc(test) or name).split("\n\n")[0].replace("\n", " ")
        started(what)
        began = time.perf_counter()
        result, message, error = _run(suite, name)
        ability = getattr(test, "ability", None)
        yield Outcome(name, what, ability, result, time.perf_counter() - began, message, error)


def _run(suite: type[PluginConformance], name: str) -> tuple[Result, str, str | None]:
    try:
        with one_thread():
            getattr(suite(), name)()
    except unittest.SkipTest as skipped:
        return "undeclared", str(skipped), None
    except Nonconforming as found:
        return "failed", str(found), None
    except Exception as error:
        return "failed", error_text(error), traceback.format_exc()
    return "passed", "", None
