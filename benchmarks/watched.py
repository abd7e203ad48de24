"""What it costs the engine's thread to be watched: metrics served, the control socket open, events logged, and what a
scrape and a ``canary top`` take from the process.

``python -m benchmarks.watched``: a CPU is enough. A forward's bracket is called with all ops replaced by nothing, so
that only the host's share is left; two processes in turns, one with metrics and socket off, one with both, the second
once more while it is scraped and asked each second (the default of Prometheus is every 15 seconds).
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace

import torch

from canary_core import BatchView, Canary, CanaryConfig, KVSource, Region, SlotTable
from canary_desk.control.client import ask, found
from canary_desk.control.messages import Request
from canary_kit.quiet import unheard

PORT = 19_464
FORWARDS, TURNS = 100_000, 5
SETTINGS = {
    "off": {"metrics": "off", "control": "off"},
    "on": {"metrics_listen": f"127.0.0.1:{PORT}", "control": "read"},
    "asked": {"metrics_listen": f"127.0.0.1:{PORT}", "control": "read"},
}


def main() -> None:
    """Each arm in processes of its own, in turns; prints the fastest of each."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))  # noqa: T201
        return
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in SETTINGS}
    for _ in range(TURNS):
        for arm, measured in results.items():
            command = [sys.executable, "-m", "benchmarks.watched", arm]
            measured.append(json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL)))
    for arm, measured in results.items():
        about = {name: min(m[name] for m in measured) for name in measured[0]}
        print(f"{arm:6}", ", ".join(f"{name} {value:.2f}" for name, value in about.items()))  # noqa: T201


def measure(arm: str) -> dict[str, float]:
    """Host time of a forward in µs, and of a scrape and a status in ms where they are asked for."""
    with unheard():
        config = CanaryConfig.load(mode="log", silence_s=0, stats_interval=1000, **SETTINGS[arm])
        pool = torch.zeros(4096, 64)
        canary = Canary([Region("kv", 4096, (KVSource(pool, "k", 0, 256, 256),))], config)
        step = canary.step
        names = ("check", "read_check", "fingerprint", "record", "fingerprint_record", "scrub")
        silent = replace(step._recorder._backend, **dict.fromkeys(names, lambda *given: None))  # type: ignore[arg-type]
        step._forward._backend = step._recorder._backend = step.scrub._backend = silent
        batch = decode(64)
        asker = Asker() if arm == "asked" else None
        for _ in range(2000):
            step.run(lambda: None, lambda: batch)
        began = time.perf_counter()
        for _ in range(FORWARDS):
            step.run(lambda: None, lambda: batch)
        taken = {"forward_us": 1e6 * (time.perf_counter() - began) / FORWARDS}
        if asker is not None:
            taken |= asker.stop()
        canary.close()
    return taken


def decode(rows: int) -> BatchView:
    """A decode of so many requests."""
    numbers = torch.arange(rows)
    table = SlotTable(torch.arange(rows * 16).view(rows, 16), write_slots=numbers)
    return BatchView(numbers * 0 + 8, numbers * 0 + 1, numbers, numbers, {"kv": table})


class Asker:
    """Scrapes the metrics and asks for the status each second, from a thread of this process: as if from outside, and
    its own work is counted as well."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._taken: dict[str, list[float]] = {"scrape_ms": [], "status_ms": []}
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Medians."""
        self._over.set()
        self._thread.join()
        return {name: statistics.median(values) for name, values in self._taken.items()}

    def _ask(self) -> None:
        while True:
            began = time.perf_counter()
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics").read()
            scraped = time.perf_counter()
            ask(found(CanaryConfig.load().control_folder(), os.getpid())[0], Request(command="status"))
            self._taken["scrape_ms"].append(1e3 * (scraped - began))
            self._taken["status_ms"].append(1e3 * (time.perf_counter() - scraped))
            if self._over.wait(1):
                return


if __name__ == "__main__":
    main()
