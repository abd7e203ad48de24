"""Runs a Python program as ``python`` does: its errors look as if Canary were absent."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from canary_core.errors import CanaryError

OURS = (__name__, "runpy")
"""Modules with frames above the program's."""

INTERRUPTED = 128 + 2
"""Exit code after Ctrl-C, as in a shell."""


class ProgramError(CanaryError):
    """No program of the given name."""


def require_file(script: str) -> None:
    """Raises `ProgramError` if there is no file or folder ``script``."""
    if not Path(script).exists():
        raise ProgramError(f"no such file: {script!r}; give the path of a Python file, or -m and the name of a module")


def run(program: str, arguments: Sequence[str], is_module: bool) -> int:
    """Runs ``program`` as ``__main__`` with its ``arguments`` and returns its exit code. An exception of the program is
    shown as by Python, without Canary's frames; `SystemExit` passes. Raises `ProgramError` if it can't be started."""
    sys.argv = [program, *arguments]
    sys.path.insert(0, "" if is_module else str(Path(program).resolve().parent))
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        own = _own_frames(error.__traceback__)
        if own is None and isinstance(error, (ImportError, OSError)):
            raise ProgramError(f"can't run {program!r}: {error}; check the name") from error
        sys.excepthook(type(error), error.with_traceback(own), own)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first frame on; None without one, as for a syntax error."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in OURS:
        trace = trace.tb_next
    return trace
