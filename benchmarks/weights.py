"""``python -m benchmarks.weights``: what the comparison of weights costs, and how soon a flipped bit of one is told.

Weights of Llama-8B's size and shapes beside a small pool, and decodes at an engine's pace (see `benchmarks.flips`),
with ``CANARY_WEIGHTS`` on. First the launch alone, over all chunks; then bits flip in random parameters, past torch,
and the clock runs until each is told. Ends with 1 if a bit was not told, or anything else was.
"""

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.flips import Decodes, Shape
from canary_core import Kind, Violation, hookimpl

LAYER = {
    "input_norm": (4096,), "qkv": (6144, 4096), "out": (4096, 4096), "post_norm": (4096,), "gate_up": (28672, 4096),
    "down": (4096, 14336),
}  # fmt: skip
LAYER_BYTES = 2 * sum(torch.Size(shape).numel() for shape in LAYER.values())
LAUNCHES = 5


class Told:
    """A plugin that notes when a finding of weights is told."""

    def __init__(self) -> None:
        self.at_s: dict[tuple[str, int], float] = {}
        self.others: list[str] = []

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        """A finding is told."""
        if violation.kind is Kind.WEIGHTS and violation.element is not None:
            self.at_s.setdefault((str(violation.source), violation.element), time.perf_counter())
        else:
            self.others.append(str(violation))


def weights(gigabytes: float, device: torch.device) -> nn.Module:
    """As many layers of bfloat16 as fit."""
    model = nn.Module()
    for number in range(max(int(gigabytes * 1e9 / LAYER_BYTES), 1)):
        layer = nn.Module()
        for name, shape in LAYER.items():
            content = torch.randint(-(1 << 14), 1 << 14, shape, dtype=torch.int16, device=device).view(torch.bfloat16)
            layer.register_parameter(name, nn.Parameter(content, requires_grad=False))
        model.add_module(str(number), layer)
    return model


def flip(weight: Tensor, element: int, bit: int) -> None:
    """Past torch's version counter."""
    weight.data.view(torch.int16).view(-1)[element] ^= 1 << bit


def launch_ms(decodes: Decodes) -> tuple[float, float]:
    """Milliseconds of one comparison of all chunks, and GB/s."""
    watch: Any = decodes.canary.step.weights
    table, workspace = watch._table, watch._workspace
    times = []
    for _ in range(LAUNCHES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        workspace.backend.compare_weights(watch._state, table, 0, table.chunks)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    best = statistics.median(times)
    return best * 1e3, table.guarded_bytes / best / 1e9


def step_ms(decodes: Decodes, steps: int = 300) -> float:
    """Median length of a forward."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        decodes.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def measure(gigabytes: float, flips: int, most_s: float, **settings: Any) -> dict[str, Any]:
    """All figures."""
    device, shape = torch.device("cuda"), Shape(pool_bytes=4 * 10**9, step_s=9e-3)
    bare = step_ms(Decodes(shape, device, **settings))
    decodes, told = Decodes(shape, device, weights=True, **settings), Told()
    decodes.canary._switch.hooks.register(told)
    model = weights(gigabytes, device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    decodes.canary.guard_weights(model)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"guard_s": time.perf_counter() - began}
    found["compare_all_ms"], found["gbps"] = launch_ms(decodes)
    for _ in range(50):
        decodes.step()
    found["step_ms"], found["step_without_ms"] = step_ms(decodes), bare
    draw, parameters = random.Random(0), dict(model.named_parameters())
    waiting: dict[tuple[str, int], float] = {}
    seconds, began, next_s = [], time.perf_counter(), 0.0
    left = flips
    while (left or waiting) and time.perf_counter() - began < most_s:
        if left and time.perf_counter() - began >= next_s:
            name = draw.choice(sorted(parameters))
            element = draw.randrange(parameters[name].numel())
            flip(parameters[name], element, draw.randrange(15))
            waiting[name, element] = time.perf_counter()
            left, next_s = left - 1, next_s + 0.3
        decodes.step()
        for key in [key for key in waiting if key in told.at_s]:
            seconds.append(told.at_s[key] - waiting.pop(key))
    stats = decodes.canary.stats()
    found |= {"flips": flips, "told": len(seconds), "seconds": sorted(seconds), "others": told.others}
    found |= {name: value for name, value in decodes.canary.scrub_stats().items() if name.startswith("weights_")}
    found |= {name: value for name, value in stats.items() if name.startswith("weights_")}
    found["memory_ratio"] = found["weights_memory_bytes"] / found["weights_bytes"]
    return found | decodes.canary.overhead_stats()


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    p.add_argument("--gigabytes", type=float, default=16.0)
    p.add_argument("--flips", type=int, default=20)
    p.add_argument("--most-s", type=float, default=90)
    p.add_argument("--budget", default="0.1%", help="CANARY_SCRUB_BUDGET")
    given = p.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stdout.write("benchmarks.weights needs an NVIDIA GPU\n")
        return 2
    found = measure(given.gigabytes, given.flips, given.most_s, scrub_budget=given.budget)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0 if found["told"] == found["flips"] and not found["others"] else 1


if __name__ == "__main__":
    sys.exit(main())
