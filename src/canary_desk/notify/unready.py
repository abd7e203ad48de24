"""`Unready`: a file that takes the engine out of service (``CANARY_UNREADY_FILE``)."""

import json
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from canary_core.errors import error_text
from canary_core.events import Event

WITHIN_S = 600.0
"""Time within which incidents count together."""

INCIDENTS = ("diagnosis", "diagnosis_failed", "incident")


class Unready:
    """Makes the file ``path`` after ``after`` incidents within ten minutes, or after one and a flood of findings, as of
    a bad memory chip. A readiness probe looks for the file, whose content is the reason and the time. The file stays
    until somebody removes it, or until a Canary starts after the end of the maker's process. A failure is told
    (``unready_failed``), at the start, too."""

    def __init__(self, path: str, after: int, tell: Callable[[Event], None]) -> None:
        self._path = Path(path)
        self._after = after
        self._tell = tell
        self._times: deque[float] = deque(maxlen=after)
        self._try(self._begin)

    def hear(self, event: Event) -> None:
        """Counts ``event``, an unsuppressed one."""
        now = time.monotonic()
        if event.name in INCIDENTS:
            self._times.append(now)
            if len(self._times) == self._after and now - self._times[0] <= WITHIN_S:
                self._times.clear()
                self._try(self._make, f"{self._after} incidents within {WITHIN_S:.0f} s")
        elif event.name == "findings_limited" and self._times and now - self._times[-1] <= WITHIN_S:
            self._times.clear()
            self._try(self._make, "a flood of findings")

    def _make(self, reason: str) -> None:
        if self._path.exists():
            return
        # Whole or not at all: a probe may look right now, and another process of the engine may make it, too.
        self._write({"reason": reason, "since": time.time(), **_process(os.getpid())}).replace(self._path)
        self._tell(Event("unready", "error", {"reason": reason, "file": str(self._path)}))

    def _write(self, fields: dict[str, object]) -> Path:
        """Writes a file into the folder of the probe's file, and makes the folder if there is none."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(fields, file)
        return new

    def _begin(self) -> None:
        self._forget_ended()
        # That the file can be made is known before it is needed.
        self._write({}).unlink()

    def _forget_ended(self) -> None:
        try:
            made = json.loads(self._path.read_text(encoding="utf-8"))
            pid, started = int(made["pid"]), made["started"]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError):
            return  # somebody else's, and theirs to remove
        if _process(pid)["started"] != started:
            self._path.unlink(missing_ok=True)

    def _try(self, do: Callable[..., None], *arguments: str) -> None:
        try:
            do(*arguments)
        except OSError as error:
            self._tell(Event("unready_failed", "warning", {"reason": error_text(error), "file": str(self._path)}))


def _process(pid: int) -> dict[str, object]:
    """The process of a number and its start, "" where none runs: numbers come round, also in a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name before may have spaces and brackets; the start is the 22nd field.
        started = f"{boot} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        started = ""
    return {"pid": pid, "started": started}
