"""Real SGLang engines for the tests: which ones there are (`setups`, `models`), processes with one engine each
(`process`, `nursery`, `driver`), what some need where there is no GPU, and scripts that start one as a user does."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
"""Where the packages ``engines`` and ``tools`` are."""


SHARED = TESTS.parents[2] / "tests"
"""Where the package ``support`` is, which tests of the core and of all plugins share."""


def command(module: str, *arguments: str) -> list[str]:
    """How a process runs a module of this package, with `python_path` in its environment."""
    return [sys.executable, "-m", f"engines.{module}", *arguments]


def python_path(*folders: Path) -> str:
    """``PYTHONPATH`` of such a process: ``folders``, the tests' packages, and what it would have had anyway."""
    return os.pathsep.join([*map(str, folders), str(TESTS), str(SHARED), os.environ.get("PYTHONPATH", "")])
