"""`CompileProcess`: compiles for this process in another one, which leaves it the interpreter's lock and the GPU."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

MODULE = "canary_core.ops.kernels.compile_child"
"""What that process runs."""

CACHE_VARIABLE = "TRITON_CACHE_DIR"

MOST_WAIT_S = 120.0
"""After so long it is given up."""


class CompileProcess:
    """Compiles into Triton's disk cache, beside whatever this process does; it has no part of the GPU, and ends when
    this process does. What it leaves undone is compiled by whoever launches it first.

    ``work``: what it compiles, as `canary_core.ops.kernels.compile_jobs` packs it. ``keys``: the names of that.
    ``folder``: Triton's cache now, None where that is none. ``remember`` notes for later starts that all of it is in
    the cache. Raises `OSError` where there can be no such process.
    """

    def __init__(self, work: bytes, keys: frozenset[str], folder: str | None, remember: Callable[[], object]) -> None:
        self.keys = keys
        self.remember = remember
        self.seconds = 0.0
        """How long it took, once it has ended."""
        self._folder = folder
        self._began = time.perf_counter()
        command = [sys.executable, "-m", MODULE, str(os.getpid())]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, env=_environment(folder)
        )
        # It takes its work when it has imported Triton, and somebody has to note its end.
        self._thread = threading.Thread(target=self._attend, args=(work,), name="canary-compile", daemon=True)
        self._thread.start()

    def _attend(self, work: bytes) -> None:
        with suppress(OSError, ValueError):
            self._process.communicate(work)
        self._process.wait()
        self.seconds = time.perf_counter() - self._began

    @property
    def code(self) -> int | None:
        """0 once all is compiled; another number where something is left, None while it runs."""
        return self._process.returncode

    def wait(self) -> None:
        """Until it has ended; ends it where that takes too long."""
        self._thread.join(MOST_WAIT_S)
        self.end()

    def end(self) -> None:
        """Ends it now."""
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()

    @contextmanager
    def same_cache(self) -> Iterator[None]:
        """Within it Triton looks where the process has put what it compiled. ``torch.compile`` gives Triton another
        cache as soon as it is used."""
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


def _environment(cache: str | None) -> dict[str, str]:
    """Of the process: modules and Triton's settings as here, and Canary guards nothing."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    environment = {**os.environ, "CANARY_MODE": "off", "PYTHONPATH": path}
    environment.pop("CANARY_PLUGINS", None)
    if cache is not None:
        environment[CACHE_VARIABLE] = cache
    return environment
