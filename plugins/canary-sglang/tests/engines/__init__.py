"""Real SGLang engines for the tests: which ones there are (`setups`, `models`), processes with one engine each
(`process`, `nursery`, `driver`), what some need where there is no GPU, and scripts that start one as a user does."""

import os
import subprocess
import sys
from collections.abc import Callable
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


def run_to_end(
    arguments: list[str],
    log: Path,
    environment: dict[str, str],
    timeout_s: float,
    begin: Callable[[], None] = lambda: None,
) -> int:
    """The exit status of an engine's process, in a process group of its own, since one that is killed takes its parent
    along; its output is in ``log``. Begun again, after ``begin``, where another engine was quicker to take the port:
    SGLang looks for a free one, and listens there later."""
    for _ in range(3):
        begin()
        with log.open("w") as out:
            done = subprocess.run(
                arguments,
                stdout=out,
                stderr=out,
                env=environment,
                timeout=timeout_s,
                start_new_session=True,
                check=False,
            )
        if "EADDRINUSE" not in log.read_text(errors="replace"):
            break
    return done.returncode
