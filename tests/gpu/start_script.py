"""An engine's start beside which another process compiles: ``python tests/gpu/start_script.py [cpu|cuda]``.

Prints, as JSON, what this process had to compile of Canary's, what was found, and the fields of ``warmed_up``. In a
process of its own, with whatever Triton's cache holds.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from ops.test_warm_up import Padded


def main() -> None:
    """Prints what came of it."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    hits: list[bool] = []

    def compiled(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if src.fn.__module__.startswith("canary_core"):
            hits.append(cache_hit)

    triton.knobs.compilation.listener = compiled
    g = Padded(device, backend="triton" if device == "cuda" else "torch", warms_up=True)
    g.canary.warm_up(g.padding, most_rows=16, beside=True)
    told: dict[str, object] = {"put_off": not g.findings.told("warmed_up"), "loaded_early": len(hits)}
    if device == "cuda":
        capture()
    for i in range(12):
        g.engine.submit(f"r{i}", list(range(5, 25)))
        g.step(3)
        slots = torch.arange(400, 440, device=device)[i:]
        g.canary.slots.alloc("full", slots)
        g.canary.slots.free("full", slots)
    g.canary.drain()
    told |= {"hits": sum(hits), "misses": len(hits) - sum(hits), "violations": g.canary.stats()["violations"]}
    told |= {"enabled": g.canary.enabled, "warmed_up": [event.fields for event in g.findings.told("warmed_up")]}
    sys.stdout.write(json.dumps(told) + "\n")


def capture() -> None:
    """A graph of the engine's own, while the other process compiles."""
    numbers, weights = torch.ones(64, 64, device="cuda"), torch.eye(64, device="cuda")
    torch.mm(numbers, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            numbers = torch.mm(numbers, weights)
    graph.replay()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
