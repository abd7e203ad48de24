"""`run`: the tests of a distribution that is not installed, in a process of their own."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """What pytest said."""

    returncode: int
    output: str

    @property
    def passed(self) -> int:
        """Tests that passed."""
        return self._count("passed")

    @property
    def failed(self) -> int:
        """Tests that failed or could not begin."""
        return self._count("failed") + self._count("error")

    def _count(self, what: str) -> int:
        found = re.search(rf"(\d+) {what}", self.output.splitlines()[-1])
        return int(found[1]) if found else 0


def run(folder: Path, *sources: Path) -> Run:
    """Runs all tests of the distribution in ``folder``, which finds Canary and ``sources`` on its path. Warnings are
    errors, as in Canary's own tests."""
    path = os.pathsep.join(map(str, [*sources, ROOT / "src"]))
    # An engine under test is guarded by its tests alone, whatever this process was started with.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "--color",
        "no",
        str(folder),
    ]
    done = subprocess.run(
        command, cwd=folder, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280
    )
    return Run(done.returncode, done.stdout + done.stderr)
