"""`Server`: the thread behind the control socket. One thread serves all; a client that hangs keeps nobody waiting."""

import contextlib
import os
import selectors
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

from canary_core.errors import ControlError
from canary_core.runtime.own_folder import is_own
from canary_core.runtime.watch import WATCH
from canary_desk.control.messages import MOST_REQUEST_BYTES, Reply, Request

MOST_CLIENTS = 16
"""Connections at a time; one more is closed at once."""

PATIENCE_S = 10.0
"""Longest silence of a client, neither asking nor taking its answer, before it is cut off."""

AGAIN_S = 0.5
"""Wait after a connection refused by the system for want of open files or memory, before the next try."""

STALE_S, MOST_SWEPT = 60.0, 256
"""Age of a socket without hope of a listener, and most sockets looked at."""

MOST_PATH_BYTES = 103
"""Length of a unix socket's path: 108 on Linux and 104 on macOS, with a zero at the end."""

Answer = Callable[[Request], Reply]


_servers: "WeakSet[Server]" = WeakSet()
"""Of this process."""


def _forked() -> None:
    for server in tuple(_servers):
        server.let_go()
    _servers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@dataclass(slots=True, eq=False)
class _Client:
    connection: socket.socket
    got: bytearray = field(default_factory=bytearray)
    due: bytearray = field(default_factory=bytearray)
    heard: float = field(default_factory=time.monotonic)


class Server:
    """Answers requests at the unix socket ``path``, one line of JSON each, by ``answer``, until `close`.

    The socket's mode is 0600 before anybody can connect, and on Linux each connection's user must be this process's own
    or root. Raises `ControlError` where the socket can't be made: another process has it, the folder can't be written
    or belongs to somebody else.
    """

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path = path
        self._answer = answer
        self._process = os.getpid()
        self._listener = _bound(path)
        self._file = path.stat().st_ino
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._wake, wakes = socket.socketpair()
        wakes.setblocking(False)
        self._wakes = wakes
        self._selector.register(wakes, selectors.EVENT_READ, None)
        self._clients: dict[socket.socket, _Client] = {}
        self._ending = False
        _servers.add(self)
        self._thread = threading.Thread(target=self._run, name="canary-control", daemon=True)
        self._thread.start()
        WATCH.expect(self._thread)

    def close(self) -> None:
        """Ends the thread and removes the socket. Does nothing in a forked process, or when called again."""
        if self._ending or os.getpid() != self._process:
            return
        self._ending = True
        WATCH.release(self._thread)
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(timeout=2.0)
        with contextlib.suppress(OSError):
            # Somebody may have taken it away, and another process put its own there.
            if self.path.stat().st_ino == self._file:
                self.path.unlink()

    def let_go(self) -> None:
        """In a forked process: closes the parent's descriptors, without a change for the parent. Else a client would
        wait in vain after the parent's end."""
        self._ending = True
        connections = [client.connection for client in self._clients.values()]
        self._selector.close()
        for end in (self._listener, self._wakes, self._wake, *connections):
            with contextlib.suppress(OSError):
                end.close()

    def _run(self) -> None:
        try:
            while not self._ending:
                for key, events in self._selector.select(timeout=1.0 if self._clients else None):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._wakes:
                        self._serve(key.data, events)
                late = time.monotonic() - PATIENCE_S
                for client in [c for c in self._clients.values() if c.heard < late]:
                    self._drop(client)
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self._selector.close()
            for end in (self._listener, self._wakes, self._wake):
                end.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:
            # The connection stays where it is, and would be offered again at once.
            time.sleep(AGAIN_S)
            return
        if len(self._clients) >= MOST_CLIENTS or not _may(connection):
            connection.close()
            return
        connection.setblocking(False)
        client = self._clients[connection] = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                sent = client.connection.send(client.due)
                del client.due[:sent]
                client.heard = time.monotonic()
            elif events & selectors.EVENT_READ:
                got = client.connection.recv(MOST_REQUEST_BYTES)
                if not got:
                    self._drop(client)
                    return
                client.got += got
                client.heard = time.monotonic()
            self._answer_one(client)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop(client)

    def _answer_one(self, client: _Client) -> None:
        """Answers the next line, if there is one and the client has taken the last answer: then no client makes us keep
        more than one."""
        if not client.due:
            line, newline, rest = bytes(client.got).partition(b"\n")
            if newline:
                client.got = bytearray(rest)
                client.due += self._reply(line).line()
            elif len(client.got) > MOST_REQUEST_BYTES:
                client.got.clear()
                client.due += Reply(error=f"a request has at most {MOST_REQUEST_BYTES} bytes").line()
        # While an answer is due nothing more is read.
        wanted = selectors.EVENT_WRITE if client.due else selectors.EVENT_READ
        self._selector.modify(client.connection, wanted, client)

    def _reply(self, line: bytes) -> Reply:
        if len(line) > MOST_REQUEST_BYTES:
            return Reply(error=f"a request has at most {MOST_REQUEST_BYTES} bytes, got {len(line)}")
        try:
            return self._answer(Request.parse(line))
        except ValueError as error:
            return Reply(error=str(error))

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.connection)
        client.connection.close()


def _bound(path: Path) -> socket.socket:
    """A listening socket at ``path``, open to its user only."""
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise ControlError(
            f"the path of a unix socket may have {MOST_PATH_BYTES} bytes, {str(path)!r} has "
            f"{len(os.fsencode(path))}; name a shorter folder in CANARY_CONTROL_DIR"
        )
    _require_own_folder(path.parent)
    _sweep(path.parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() or path.is_symlink():
            _clear(path)
        listener.bind(str(path))
        # Nobody can connect before it listens.
        path.chmod(0o600)
        listener.listen(MOST_CLIENTS)
    except OSError as error:
        listener.close()
        raise ControlError(
            f"the control socket {str(path)!r} can't be made ({error}); see CANARY_CONTROL_DIR"
        ) from error
    except ControlError:
        listener.close()
        raise
    return listener


def _require_own_folder(folder: Path) -> None:
    """Makes a missing ``folder``. Raises `ControlError` unless it belongs to the user and nobody else can write to
    it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ControlError(
            f"the folder {str(folder)!r} of the control socket can't be made ({error}); name another in "
            "CANARY_CONTROL_DIR"
        ) from error
    if not is_own(folder):
        raise ControlError(
            f"the folder {str(folder)!r} of the control socket must be one that belongs to this user and that nobody "
            "else can write to; correct it (chmod 700), or name another in CANARY_CONTROL_DIR"
        )


def _clear(path: Path) -> None:
    """Removes a socket without a listener. Raises `ControlError` for anything else."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ControlError(f"{str(path)!r} is there and is no socket; take it away, or set CANARY_CONTROL_DIR")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise ControlError(f"another process listens at {str(path)!r}; give each its own folder in CANARY_CONTROL_DIR")


def _sweep(folder: Path) -> None:
    """Removes sockets of killed processes. A new one may be about to listen."""
    for left in list(folder.glob("*.sock"))[:MOST_SWEPT]:
        with contextlib.suppress(OSError, ControlError):
            if time.time() - left.stat().st_mtime > STALE_S:
                _clear(left)


def _may(connection: socket.socket) -> bool:
    """Whether the user at the other end is ours, or root. Where the system does not say, the file's mode decides."""
    if sys.platform != "linux":
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return user in (os.geteuid(), 0)
