"""Processes with one engine each. On a CPU most of the time that an engine takes to start goes into importing SGLang,
so they are forked off one process that has done that: `engines.nursery`."""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from engines import command, python_path
from engines.setups import Setup

GUARD = {
    "CANARY_PLUGINS": "sglang",
    "CANARY_READ_CHECK": "-1",
    "CANARY_INCIDENT_TOKENS": "true",
    "CANARY_STATE_INTERVAL": "1",
    "CANARY_SCRUB_BUDGET": "8MiB",
    "CANARY_RING_ROWS": "65536",
}
"""All bytes are looked at around every forward, and what stays broken leaves room in the ring for what is new."""


class EngineProcess:
    """A process that runs `engines.driver`, or another driver of the setup. Each of its commands can be called here by
    name, with keywords."""

    def __init__(self, setup: Setup, folder: Path, **settings: str) -> None:
        ours = ("CANARY_", "PYTEST_", "TRITON_INTERPRET")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        environment |= {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **setup.environment}
        options = {"folder": str(folder / "model"), "driver": setup.driver, **setup.options}
        self.setup = setup
        self._log = folder / "engine.log"
        # A process that has asked for a GPU can't be forked, and importing SGLang asks for one.
        begin = start if setup.options.get("device") == "cuda" else fork
        self._driver: Any = begin(options, {**GUARD, **settings, **environment}, self._log)
        self._answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            self._driver.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
            self._driver.stdin.flush()
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
        """Ends the process, which must be waiting for a command or have ended."""
        with contextlib.suppress(BrokenPipeError):
            self._driver.stdin.close()
        self._driver.wait(60)
        self._driver.stdout.close()

    def _answer(self) -> dict[str, Any]:
        # A process that hangs would take the whole run with it.
        watch = threading.Timer(self.setup.patience_s, self._driver.kill)
        watch.start()
        line = self._driver.stdout.readline()
        watch.cancel()
        if not line:
            raise RuntimeError(f"the engine's process has ended\n{self.log[-6000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(options: dict[str, Any], environment: dict[str, str], log: Path) -> "subprocess.Popen[str]":
    """A driver that imports everything itself."""
    with log.open("w") as stderr:
        return subprocess.Popen(
            command(options.pop("driver"), json.dumps(options)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )


def fork(options: dict[str, Any], environment: dict[str, str], log: Path) -> "Fork":
    """A driver from the nursery of its environment."""
    imported = {name: value for name, value in environment.items() if not name.startswith("CANARY_")}
    return Nursery.of(imported, log).fork(options, environment, log)


class Fork:
    """A forked process, as far as it is like a `subprocess.Popen`."""

    def __init__(self, process_id: int, stdin: int, stdout: int) -> None:
        self._process: int | None = os.pidfd_open(process_id)
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = os.fdopen(stdout)

    def kill(self) -> None:
        """Ends it at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Until it has ended, for so many seconds at most."""
        if self._process is None:
            return
        ended, _, _ = select.select([self._process], [], [], timeout)
        if not ended:
            raise TimeoutError(f"an engine's process did not end within {timeout} s")
        os.close(self._process)
        self._process = None


class Nursery:
    """A process that runs `engines.nursery`, which says on ``log`` what is said while SGLang is imported."""

    _last: ClassVar[dict[frozenset[tuple[str, str]], "Nursery"]] = {}

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("a") as stderr:
            self._process = subprocess.Popen(
                command("nursery", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                env=environment,
            )

    @classmethod
    def of(cls, environment: dict[str, str], log: Path) -> "Nursery":
        """That of an environment. Each takes memory, so the two used last are kept; drivers outlive theirs."""
        key = frozenset(environment.items())
        found = cls._last.pop(key, None) or cls(environment, log)
        cls._last[key] = found
        while len(cls._last) > 2:
            cls._last.pop(next(iter(cls._last))).close()
        return found

    @classmethod
    def close_all(cls) -> None:
        """At the end of the process."""
        for nursery in cls._last.values():
            nursery.close()
        cls._last.clear()

    def fork(self, options: dict[str, Any], environment: dict[str, str], log: Path) -> Fork:
        """One more driver, which writes its stderr to ``log``."""
        order = json.dumps({"options": options, "environment": environment}).encode()
        stdin, our_stdin = os.pipe()
        our_stdout, stdout = os.pipe()
        with log.open("a") as stderr:
            socket.send_fds(self._orders, [order], [stdin, stdout, stderr.fileno()])
        os.close(stdin)
        os.close(stdout)
        answer = self._orders.recv(64)
        if not answer:
            raise RuntimeError(f"a process of engines.nursery has ended\n{log.read_text(errors='replace')[-6000:]}")
        return Fork(int(answer), our_stdin, our_stdout)

    def close(self) -> None:
        """Ends the process; its drivers stay."""
        self._orders.close()
        self._process.wait(60)


atexit.register(Nursery.close_all)
