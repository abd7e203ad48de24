"""Program of a `CompileProcess`: ``python -m canary_core.ops.kernels.compile_child PARENT``, with packed jobs as input.

Fills Triton's disk cache for the process ``PARENT``, and ends with it. Loads nothing on the GPU. The exit status and
the last output (`DONE`) say whether everything is compiled.
"""

import fcntl
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import triton

from canary_core.ops.compile_process import DONE
from canary_core.ops.kernels.compile_jobs import CompileJob, Stamp, pack, unpack
from canary_core.ops.kernels.launch import MOST_COMPILERS

NICENESS = 5
"""The engine comes first."""

STDOUT = 1
"""File descriptor."""

LOOK_S = 0.5
"""Time between two looks at whether the engine is there."""


def main() -> int:
    """The exit status."""
    os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    jobs = unpack(sys.stdin.buffer.read())
    # Ranks on one machine start together, and all of them need the same.
    with _alone(Stamp(jobs).folder):
        if not _compile_in_forks(jobs):
            return 1
    sys.stdout.buffer.write(DONE)
    return 0


def _compile_in_forks(jobs: Sequence[CompileJob]) -> bool:
    """Compiles side by side, in forks of this process, which have Triton loaded: a compilation holds Python's lock most
    of the time, so threads would wait for each other. Whether all succeeded. Raises `RuntimeError` where a fork
    was killed."""
    several = max(1, min(MOST_COMPILERS, len(os.sched_getaffinity(0)), len(jobs)))
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(several, mp_context=fork, initializer=_begin_fork, initargs=(os.getpid(),)) as forks:
        return all(list(forks.map(_compile, [pack([job]) for job in jobs])))


def _begin_fork(parent: int) -> None:
    """A fork ends with its parent, and never keeps the parent's output open."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), STDOUT)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends the process as soon as its parent has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


@contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """Context for one process at a time, for each ``folder``."""
    if folder is None:
        yield
        return
    with (folder / "compiling").open("w") as file:
        # Some file systems have no locks: then all compile.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _launchers() -> Callable[..., Any] | None:
    """Triton's launchers for the GPU's driver, None where there is no driver."""
    try:
        made: Callable[..., Any] = triton.runtime.driver.active.launcher_cls
    except Exception:
        return None
    return made


def _compile(packed: bytes) -> bool:
    """Whether the one packed job succeeded."""
    launcher = _launchers()
    try:
        (job,) = unpack(packed)
        kernel = job.compile()
        if launcher is not None:
            # Triton up to 3.6 has a C compiler make it, and keeps that in its cache, too.
            launcher(kernel.src, kernel.metadata)
    except Exception:
        return False
    return launcher is not None


if __name__ == "__main__":
    sys.exit(main())
