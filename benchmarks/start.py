"""What an engine's start takes longer: the pool's guard and `Canary.warm_up`, in processes of their own, with no kernel
compiled before and with all.

``python -m benchmarks.start [cpu|cuda]`` prints one of them as JSON, with whatever Triton's cache holds.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from benchmarks.setting import REGION, Traffic, region
from benchmarks.step import DECODE
from canary_core import BatchView, Canary, CanaryConfig, SlotTable
from canary_core.testing.quiet import unheard

MOST_ROWS = 256


def measure(device: str = "cuda") -> dict[str, dict[str, float]]:
    """Seconds of ``attach`` and ``warm_up``: ``cold``, with an empty Triton cache, and ``warm``, with the one that this
    leaves."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        return {kind: _child(device, environment) for kind in ("cold", "warm")}


def one(device: str) -> dict[str, float]:
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
        began = time.perf_counter()
        canary = Canary([guarded], CanaryConfig(), warms_up=True)
        attached = time.perf_counter()
        canary.sampled.follow()
        canary.warm_up(padding, MOST_ROWS)
        seconds = {"attach": attached - began, "warm_up": time.perf_counter() - attached}
        if not canary.enabled:
            raise RuntimeError("an error switched Canary off; run it with CANARY_MODE=raise to see it")
        canary.close()
    return seconds


def _use_triton(numbers: torch.Tensor) -> None:
    """Compiles and launches a kernel that is not ours."""
    import triton

    @triton.jit
    def nothing(p_numbers):  # type: ignore[no-untyped-def]
        pass

    nothing[(1,)](numbers)


def _child(device: str, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.start", device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1] if len(sys.argv) > 1 else "cuda")))  # noqa: T201
