"""A reporter: writes every finding to a file, as a line of JSON, and counts them."""

import atexit
import json
import os
import queue
import threading
from collections import Counter
from datetime import datetime, timezone

from canary_core import Canary, CanaryConfig, Violation, hookimpl

MOST_WAITING = 10_000
"""Lines that wait for the file; more are dropped and counted as such, so that a slow disk takes no memory."""


class FindingsFile:
    """Canary calls the hooks on the engine's own thread, so they only queue what a thread of ours writes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._path: str | None = None
        self._lines: queue.Queue[dict[str, object]] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None

    @hookimpl
    def canary_configure(self, config: CanaryConfig) -> None:
        """Called several times. An exception here refuses the plugin, with its sentence."""
        self._path = os.environ.get("FINDINGS_FILE")
        if not self._path:
            raise ValueError("FINDINGS_FILE must name the file that findings are written to; it is not set")
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="findings-file", daemon=True)
            self._thread.start()
            atexit.register(self._lines.join)

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        """A finding that nobody has dismissed."""
        self.counts[violation.kind.name.lower()] += 1
        self._put({"event": "finding", **violation.fields()})

    @hookimpl
    def canary_detached(self, canary: Canary) -> None:
        """A pool was closed: every finding of it was told."""
        self._put({"event": "counts", "regions": list(canary.regions), **self.counts})

    def _put(self, line: dict[str, object]) -> None:
        try:
            self._lines.put_nowait({"time": datetime.now(timezone.utc).isoformat(), **line})
        except queue.Full:
            self.counts["dropped"] += 1

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            try:
                with open(str(self._path), "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError:
                self.counts["dropped"] += 1
            finally:
                self._lines.task_done()

    def flush(self) -> None:
        """Waits until all that was found so far is in the file."""
        self._lines.join()


REPORTER = FindingsFile()
