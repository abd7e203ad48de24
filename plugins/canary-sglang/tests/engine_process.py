"""Processes with one engine each."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setups import Setup

DRIVER = Path(__file__).with_name("engine_driver.py")


class EngineProcess:
    """An `engine_driver` process. Each of its `COMMANDS` can be called here by name, with keywords."""

    def __init__(self, setup: Setup, folder: Path, **settings: str) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_") and k != "TRITON_INTERPRET"}
        # All bytes are looked at around every forward, and what stays broken leaves room in the ring for what is new.
        canary = {
            "CANARY_PLUGINS": "sglang",
            "CANARY_READ_CHECK": "-1",
            "CANARY_STATE_INTERVAL": "1",
            "CANARY_SCRUB_BUDGET": "8MiB",
            "CANARY_RING_ROWS": "65536",
            **settings,
        }
        self.setup = setup
        self._log = folder / "engine.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(DRIVER), json.dumps({"folder": str(folder / "model"), **setup.options})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**inherited, **canary, **setup.environment, "OMP_NUM_THREADS": "1"},
            )
        self._answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
            if "error" in answer:
                raise RuntimeError(f"{name}: {answer['error']}\n{self.log[-3000:]}")
            return answer["result"]

        return call

    @property
    def log(self) -> str:
        """Everything that the process said on stderr."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # A process that hangs would take the whole run with it.
        watch = threading.Timer(self.setup.patience_s, self._process.kill)
        watch.start()
        line = self._process.stdout.readline()
        watch.cancel()
        if not line:
            raise RuntimeError(f"the engine's process ended with {self._process.wait(60)}\n{self.log[-6000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
