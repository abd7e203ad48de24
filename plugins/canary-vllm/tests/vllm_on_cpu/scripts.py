"""Runs a script of this package in a process of its own, for engines that can't share one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SHARED = TESTS.parents[2] / "tests"
"""Where the package ``support`` is, which tests of the core and of all plugins share."""


def told_by(script: str, *arguments: str, plugins: str = "", timeout_s: int = 500, **more: str) -> dict[str, Any]:
    """The last JSON object that the script ``vllm_on_cpu.script`` prints, in an environment with these ``plugins`` and
    ``more``."""
    return said_by(script, *arguments, plugins=plugins, timeout_s=timeout_s, **more)[0]


def said_by(
    script: str, *arguments: str, plugins: str = "", timeout_s: int = 500, **more: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """As `told_by`, and the events that Canary logged, of all processes, if ``more`` asks for them as JSON."""
    path = os.pathsep.join(filter(None, (str(TESTS), str(SHARED), os.environ.get("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, "-m", f"vllm_on_cpu.{script}", *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "CANARY_PLUGINS": plugins, **more},
        timeout=timeout_s, check=False,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    assert lines, run.stderr[-3000:]
    told: dict[str, Any] = json.loads(lines[-1])
    every = [line[line.index("{") :] for line in (run.stdout + run.stderr).splitlines() if '"event": ' in line]
    return told, [json.loads(line) for line in every]
