"""`CompileProcess`: compiles in a process of its own, without the engine's interpreter lock and GPU."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

MODULE = "canary_core.ops.kernels.compile_child"
"""The module run by the process."""

START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)
"""Line that runs the module, found in the folders given, and by its forks."""

DONE = b"all is compiled"
"""Last output of the process where it is so: the exit status of a child is lost where SIGCHLD is ignored."""

CACHE_VARIABLE = "TRITON_CACHE_DIR"

MOST_WAIT_S = 120.0
"""Longest wait for the process, before it is ended."""


class CompileProcess:
    """Compiles into Triton's disk cache, beside the engine's process; uses no GPU, and ends with the engine's process.
    The first launch compiles whatever is left undone.

    ``work``: jobs packed by `canary_core.ops.kernels.compile_jobs`. ``keys``: names of the jobs. ``folder``: Triton's
    current cache, None for none. ``remember`` notes for later starts that all jobs are in the cache. Raises `OSError`
    where no such process can start.
    """

    def __init__(self, work: bytes, keys: frozenset[str], folder: str | None, remember: Callable[[], object]) -> None:
        self.keys = keys
        self.remember = remember
        self.seconds = 0.0
        """Duration of the process, known after the end."""
        self._folder = folder
        self._began = time.perf_counter()
        self._code: int | None = None
        # Isolated: without the working directory, where others may put modules of any name.
        command = [_python(), "-I", "-c", START.format(module=MODULE), str(os.getpid()), json.dumps(_path())]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=_environment(folder)
        )
        # It takes its work when it has imported Triton, and somebody has to note its end.
        self._thread = threading.Thread(target=self._attend, args=(work,), name="canary-compile", daemon=True)
        self._thread.start()

    def _attend(self, work: bytes) -> None:
        said = b""
        with suppress(OSError, ValueError):
            said, _ = self._process.communicate(work)
        status = self._process.wait()
        self.seconds = time.perf_counter() - self._began
        self._code = status or int(not said.endswith(DONE))

    @property
    def code(self) -> int | None:
        """0 once all is compiled; another number where something is left, None while the process runs."""
        return self._code

    def runs(self) -> bool:
        """Whether it still compiles."""
        return self._code is None

    def wait(self) -> None:
        """Waits for the end; ends the process after `MOST_WAIT_S`."""
        self._thread.join(MOST_WAIT_S)
        self.end()

    def end(self) -> None:
        """Ends the process now."""
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()

    @contextmanager
    def same_cache(self) -> Iterator[None]:
        """Context: Triton looks in the process's cache. ``torch.compile`` gives Triton another cache on first use."""
        before = os.environ.get(CACHE_VARIABLE)
        if self._folder is None or before == self._folder:
            yield
            return
        os.environ[CACHE_VARIABLE] = self._folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[CACHE_VARIABLE]
            else:
                os.environ[CACHE_VARIABLE] = before


def _python() -> str:
    """The interpreter. Raises `OSError` where ``sys.executable`` is something else, which would be started a second
    time: a frozen application, or one that embeds Python."""
    name = os.path.basename(sys.executable or "").lower()
    if getattr(sys, "frozen", False) or not ("python" in name or "pypy" in name):
        raise OSError(f"sys.executable is {sys.executable!r}, which is no Python interpreter")
    return sys.executable


def _environment(cache: str | None) -> dict[str, str]:
    """Of the process: Triton's settings as here, and Canary guards nothing."""
    environment = {**os.environ, "CANARY_MODE": "off"}
    environment.pop("CANARY_PLUGINS", None)
    if cache is not None:
        environment[CACHE_VARIABLE] = cache
    return environment


def _path() -> list[str]:
    """Folders of modules, as here but for the working directory, which comes last if canary_core itself is in it."""
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:
        here = ""
    folders = [os.path.join(here, folder) for folder in sys.path if folder]
    elsewhere = [folder for folder in folders if os.path.isabs(folder) and os.path.realpath(folder) != here]
    ours = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
    return [*elsewhere, here] if ours == here else elsewhere
