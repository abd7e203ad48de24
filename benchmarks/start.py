"""What an engine's start takes longer: the pool's guard and `Canary.warm_up`, in processes of their own, with no kernel
compiled before and with all.

``python -m benchmarks.start [cpu|cuda] [beside|here]`` prints one of them as JSON, with whatever Triton's cache holds.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

import torch

from benchmarks.setting import REGION, Traffic, region
from benchmarks.step import DECODE
from canary_core import BatchView, Canary, CanaryConfig, SlotTable
from canary_kit.quiet import unheard

MOST_ROWS = 256


def measure(device: str = "cuda") -> dict[str, dict[str, float]]:
    """Seconds that a start is held up by ``attach``, by ``warm_up``, and by what that puts off, ``finish``; and for how
    long something is compiled ``beside`` the engine. ``cold``: with an empty Triton cache, in an engine that goes on
    to start for that long; ``warm``: with the cache that this leaves; ``here``: with an empty one, and nothing put
    off."""
    told = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        for kind in ("cold", "warm"):
            told[kind] = _child(device, "beside", environment)
    with tempfile.TemporaryDirectory() as cache:
        told["here"] = _child(device, "here", {**os.environ, "TRITON_CACHE_DIR": cache})
    return told


def one(device: str, beside: bool) -> dict[str, float]:
    """The seconds of this process. The device and Triton are in use before the clock starts, as in an engine."""
    case = DECODE if device == "cuda" else DECODE.tiny()
    traffic = Traffic.random(case, torch.device(device))
    if device == "cuda":
        _use_triton(traffic.entries)

    def padding(rows: int) -> list[BatchView]:
        """A decode and a prefill, as engines have them."""
        none = torch.zeros(rows, dtype=torch.int32, device=device)
        numbers = none.long()
        table = SlotTable(traffic.entries, numbers, traffic.page_size, write_slots=numbers)
        return [
            BatchView(none, none, numbers, none, {REGION: table}, positions=numbers, expected_tokens=expected)
            for expected in (None, torch.full((rows, 64), -1, dtype=torch.int32, device=device))
        ]

    with unheard():
        guarded = region(case, traffic)
        times = [time.perf_counter()]
        canary = Canary([guarded], CanaryConfig(), warms_up=True)
        times.append(time.perf_counter())
        canary.sampled.follow()
        canary.warm_up(padding, MOST_ROWS, beside=beside)
        times.append(time.perf_counter())
        canary._start_up.wait()
        times.append(time.perf_counter())
        canary.finish_warm_up()
        times.append(time.perf_counter())
        if not canary.enabled:
            raise RuntimeError("an error switched Canary off; run it with CANARY_MODE=raise to see it")
        canary.close()
    parts = zip(("attach", "warm_up", "beside", "finish"), times, times[1:], strict=False)
    return {name: end - began for name, began, end in parts}


def held_up(seconds: Mapping[str, float]) -> float:
    """For how long the engine waits, in all."""
    return seconds["attach"] + seconds["warm_up"] + seconds["finish"]


def _use_triton(numbers: torch.Tensor) -> None:
    """Compiles and launches a kernel that is not ours."""
    import triton

    @triton.jit
    def nothing(p_numbers):  # type: ignore[no-untyped-def]
        pass

    nothing[(1,)](numbers)


def _child(device: str, how: str, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.start", device, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    print(json.dumps(one(device, beside=sys.argv[2:] != ["here"])))  # noqa: T201
