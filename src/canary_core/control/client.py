"""Finds the control sockets of this machine's guarded engines, and asks one."""

import contextlib
import socket
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from canary_core.control.messages import MOST_REPLY_BYTES, Reply, Request
from canary_core.errors import ControlError

ANSWER_S = 5.0
"""How long an engine may take to answer: its host may be busy."""


def ask(path: Path, request: Request) -> dict[str, Any]:
    """The result of ``request`` by the engine that listens at ``path``. Raises `ControlError` where nobody listens, the
    request is refused, or what comes back is no answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(str(path))
            connection.sendall(request.line())
            line = _line(connection)
    except TimeoutError as error:
        raise ControlError(f"{path} did not answer within {ANSWER_S:g} s; is its process stopped?") from error
    except OSError as error:
        raise ControlError(f"nobody answers at {path} ({error}); has the engine ended?") from error
    try:
        reply = Reply.model_validate_json(line)
    except ValidationError as error:
        raise ControlError(f"what listens at {path} is no Canary, or one of another release") from error
    if reply.error is not None:
        raise ControlError(reply.error)
    return reply.result


def found(folder: Path, pid: int | None = None) -> list[Path]:
    """Sockets in ``folder`` at which somebody listens, the oldest first; only that of process ``pid``, if one is
    given. Raises `ControlError` if there is none."""
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
        except OSError:
            return False
        return True


def _line(connection: socket.socket) -> bytes:
    got = bytearray()
    while not got.endswith(b"\n") and len(got) <= MOST_REPLY_BYTES:
        part = connection.recv(65536)
        if not part:
            break
        got += part
    return bytes(got)
