"""Finds the control sockets of this machine's guarded engines, and sends requests."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from canary_core.errors import ControlError
from canary_core.events import all_escaped, escaped
from canary_core.runtime.own_folder import is_own
from canary_desk.control.messages import CHANGES, MOST_REPLY_BYTES, Reply, Request

ANSWER_S, CHANGE_S = 2.0, 5.0
"""Longest time for an engine's answer to a question, or to a command: its host may be busy."""

Answer = dict[str, Any]
Result = TypeVar("Result")


class SilentError(ControlError):
    """Somebody listens, and does not answer in time."""


def ask(path: Path, request: Request) -> Answer:
    """The result of ``request`` by the engine at ``path``. Raises `ControlError` where nobody listens, the request is
    refused, the reply is no answer, or none comes within `ANSWER_S` (`CHANGE_S`)."""
    patience_s = CHANGE_S if request.command in CHANGES else ANSWER_S
    deadline = time.monotonic() + patience_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(patience_s)
            connection.connect(str(path))
            connection.sendall(request.line())
            line = _line(connection, deadline)
    except (TimeoutError, BlockingIOError) as error:
        # A full queue of connections says so at once: its process takes none up.
        raise SilentError(_silent(path, request, patience_s)) from error
    except OSError as error:
        raise ControlError(f"nobody answers at {path} ({error}); has the engine ended?") from error
    try:
        reply = Reply.model_validate_json(line)
    except ValidationError as error:
        raise ControlError(f"what listens at {path} is no Canary, or one of another release") from error
    if reply.error is not None:
        raise ControlError(escaped(reply.error))
    result: Answer = all_escaped(reply.result)
    return result


def ask_all(paths: Sequence[Path], request: Request) -> "dict[Path, Answer | ControlError]":
    """The result of ``request``, or why there is none, of each engine, asked at the same time: one that does not answer
    keeps no other one's answer back."""

    return at_once(paths, lambda path: ask(path, request))


def at_once(
    paths: Sequence[Path], one: Callable[[Path], Result], given_up: Callable[[], None] | None = None
) -> "dict[Path, Result | ControlError]":
    """``one`` for each path at the same time, or its `ControlError`. ``given_up``: called at Ctrl-C, for all to end."""

    def given(path: Path) -> "Result | ControlError":
        try:
            return one(path)
        except ControlError as error:
            return error

    with ThreadPoolExecutor(max(len(paths), 1)) as pool:
        try:
            return dict(zip(paths, pool.map(given, paths), strict=True))
        except KeyboardInterrupt:
            if given_up is not None:
                given_up()
            raise


def found(folder: Path, pid: int | None = None) -> list[Path]:
    """Sockets in ``folder`` with a listener, the oldest first; only process ``pid``'s, if given. Raises `ControlError`
    without any, and for a ``folder`` that other users could put a socket into."""
    if os.path.lexists(folder) and not is_own(folder):
        raise ControlError(
            f"the folder {str(folder)!r} does not belong to this user, or others can write to it, so whoever answers "
            "there may be somebody else; ask as the engine's user, or see CANARY_CONTROL_DIR"
        )
    sockets = []
    with contextlib.suppress(OSError):
        sockets = sorted(folder.glob("*.sock"), key=lambda path: path.stat().st_mtime)
    alive = [path for path in sockets if (pid is None or path.stem == str(pid)) and _listens(path)]
    if not alive:
        which = "no guarded engine of this user" if pid is None else f"process {pid}"
        raise ControlError(
            f"{which} listens in {folder}; start the engine with CANARY_PLUGINS and without CANARY_CONTROL=off, and "
            "see that CANARY_CONTROL_DIR is the same here and there"
        )
    return alive


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ANSWER_S)
        try:
            probe.connect(str(path))
        except (TimeoutError, BlockingIOError):
            # Somebody listens, and takes up no connection: to be told of when it is asked.
            return True
        except OSError:
            return False
        return True


def _silent(path: Path, request: Request, seconds: float) -> str:
    """Sentence about the missing answer of the process of ``path``, with the reason, where the system knows."""
    pid = path.stem
    why = "is it stopped, or its host very busy?"
    with contextlib.suppress(OSError, IndexError):
        if Path("/proc", pid, "stat").read_text().rpartition(") ")[2][0] in "Tt":
            why = f"it is stopped; kill -CONT {pid} lets it go on"
    late = f" Once it goes on, it may do it: see canary ctl status --pid {pid}." if request.command in CHANGES else ""
    return f"process {pid} did not answer within {seconds:g} s at {path}: {why}{late}"


def _line(connection: socket.socket, deadline: float) -> bytes:
    got = bytearray()
    while not got.endswith(b"\n") and len(got) <= MOST_REPLY_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(65536)
        if not part:
            break
        got += part
    return bytes(got)
