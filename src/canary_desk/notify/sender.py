"""`Sender`: delivers messages from a bounded queue, on a thread of its own, with retries."""

import hashlib
import hmac
import json
import queue
import shlex
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import IO, Any

from canary_core.config.key_file import read_key
from canary_core.errors import error_text

MOST_WAITING = 64
"""Messages waiting for delivery; more are counted as lost."""

MOST_BYTES = 16 << 10
"""Longest message; a longer one loses its fields beyond the first ones."""

TRIES, FIRST_PAUSE_S = 5, 1.0
"""Tries of one message, and the pause before the second one; each further pause is twice as long."""

PATIENCE_S = 10.0
"""Longest time for one try."""


@dataclass(frozen=True, slots=True)
class Target:
    """The receiver. ``command``: a program with arguments, empty for an address. ``url``: an address, empty for a
    program. ``key``: signs each message, empty for none."""

    command: tuple[str, ...] = ()
    url: str = ""
    key: bytes = b""

    @classmethod
    def of(cls, notify: str, key_file: str) -> "Target":
        """From ``CANARY_NOTIFY`` and ``CANARY_NOTIFY_KEY_FILE``. Raises `ConfigError` where the key can't be read."""
        key = read_key("CANARY_NOTIFY_KEY_FILE", key_file) if key_file else b""
        scheme, _, rest = notify.partition(":")
        return cls(tuple(shlex.split(rest)), key=key) if scheme == "exec" else cls(url=notify, key=key)

    def deliver(self, body: bytes) -> None:
        """One try. Raises OSError, or a subclass of `subprocess.SubprocessError`, on failure."""
        stamp = str(int(time.time()))
        signed = {"X-Canary-Timestamp": stamp}
        if self.key:
            digest = hmac.new(self.key, f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()
            signed["X-Canary-Signature"] = f"sha256={digest}"
        if self.command:
            # The head as of a request, an empty line, the body: a program has no other place for it.
            head = "".join(f"{name}: {value}\n" for name, value in signed.items())
            subprocess.run(
                self.command,
                input=f"{head}\n".encode() + body,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=PATIENCE_S,
                check=True,
            )
            return
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json", **signed})
        with _OPENER.open(request, timeout=PATIENCE_S):
            pass


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: what is signed goes where the operator said."""

    def redirect_request(  # noqa: PLR0913  (the signature of urllib)
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


_OPENER = urllib.request.build_opener(_Stay)


class Sender:
    """Delivers to ``target``. `send` is called from any thread and waits for nothing; a thread, started by the first
    message, does the rest and ends when idle. ``failed`` is called on that thread with a sentence, for a message that
    was given up, and with the number of those lost since."""

    def __init__(
        self, target: Target, failed: Callable[[str, int], None], first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        self._target = target
        self._failed = failed
        self._first_pause_s = first_pause_s
        self._waiting: queue.Queue[bytes] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self.sent = 0
        """Messages delivered."""
        self.lost = 0
        """Messages given up, or without room."""

    def send(self, fields: Mapping[str, Any]) -> None:
        """Queues a message."""
        try:
            self._waiting.put_nowait(_body(fields))
        except queue.Full:
            self.lost += 1
            return
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="canary-notify", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    # At the end of a process none can be started.
                    self._thread = None

    def finish(self, seconds: float) -> None:
        """Waits until all is delivered or given up, for so long at most; pauses between tries are cut short."""
        self._hurry.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        self._hurry.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                try:
                    body = self._waiting.get_nowait()
                except queue.Empty:
                    self._thread = None
                    return
            self._deliver(body)

    def _deliver(self, body: bytes) -> None:
        reason = ""
        for turn in range(TRIES):
            if turn:
                self._hurry.wait(self._first_pause_s * 2 ** (turn - 1))
            try:
                self._target.deliver(body)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                reason = error_text(error)
                continue
            self.sent += 1
            return
        self.lost += 1
        self._failed(reason[:500], self.lost)


def _body(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, default=str).encode()
    if len(text) > MOST_BYTES:
        kept = {name: value for name, value in fields.items() if len(json.dumps(value, default=str)) < MOST_BYTES // 32}
        text = json.dumps({**kept, "shortened": True}, default=str).encode()
    return text
