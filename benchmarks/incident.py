"""How long an incident takes: on the engine's thread, and until its bundle is on the disk.

``python -m benchmarks.incident [cpu|cuda]``: a pool like that of a Llama-8B (32 layers, 2048 bytes a slot and half,
20000 slots), one request of 1000 tokens, of which a page of 16 slots is overwritten in all layers.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

from canary_core import BatchView, Canary, CanaryConfig, KVSource, Region, SlotTable
from canary_core.incident import Incident
from canary_desk.incidents.investigator import Investigator
from canary_kit.quiet import unheard

SLOTS, LAYERS, ROW, TOKENS = 20_000, 32, 1024, 1000


def main() -> None:
    """Prints a line for each figure."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    directory = Path(tempfile.mkdtemp())
    pools = [
        (half, layer, torch.zeros(SLOTS, ROW, dtype=torch.bfloat16, device=device))
        for layer in range(LAYERS)
        for half in "kv"
    ]
    sources = tuple(KVSource(t, half, layer, 2 * ROW, 2 * ROW, dtype=t.dtype) for half, layer, t in pools)
    settings = {"read_check": -1, "incident_dir": str(directory), "scrub_budget": "0", "read_interval": 1}
    config = CanaryConfig.load(**settings)
    with unheard():
        canary = Canary([Region("kv", SLOTS, sources)], config)
        for attempt in range(3):
            print(f"attempt {attempt}: {incident(canary, pools, directory, device)}")  # noqa: T201
        canary.close()


def incident(canary: Canary, pools: list[tuple[str, int, torch.Tensor]], directory: Path, device: str) -> str:
    """Writes a request, breaks it, and waits for the bundle."""
    base = 100 + 5000 * canary.forwards % 15_000
    table = torch.arange(base, base + TOKENS + 1, dtype=torch.int32, device=device)[None]
    writer = canary.writers.id(f"request-{canary.forwards}")

    def view(prefix: int, new: int) -> BatchView:
        def one(number: int) -> torch.Tensor:
            return torch.tensor([number], device=device)

        tokens = torch.arange(new, device=device) + prefix
        return BatchView(one(prefix), one(new), tokens, one(writer), {"kv": SlotTable(table)})

    def write(first: int, count: int) -> None:
        for _, _, tensor in pools:
            tensor[base + first : base + first + count] = torch.randn(count, ROW, device=device).to(tensor.dtype)

    canary.step.run(lambda: write(0, TOKENS), lambda: view(0, TOKENS))
    before = len(list(directory.iterdir()))
    write(64, 16)
    looked = Investigator.look
    spent = []

    def timed(own: Investigator, canary: Canary, incident: Incident) -> None:
        began = time.perf_counter()
        looked(own, canary, incident)
        spent.append(time.perf_counter() - began)

    Investigator.look = timed  # type: ignore[method-assign]
    for number in range(8):
        canary.step.run(lambda number=number: write(TOKENS, 1), lambda: view(TOKENS, 1))  # type: ignore[misc]
        if spent:
            break
    found = time.perf_counter()
    while len([p for p in directory.iterdir() if p.name.startswith("incident-")]) == before:
        time.sleep(0.001)
    seconds = time.perf_counter() - found
    Investigator.look = looked  # type: ignore[method-assign]
    newest = max(directory.iterdir(), key=lambda p: p.stat().st_mtime)
    size = sum(file.stat().st_size for file in newest.iterdir())
    return f"engine's thread {1000 * sum(spent):.1f} ms, on disk after {1000 * seconds:.0f} ms, {size / 1e6:.2f} MB"


if __name__ == "__main__":
    main()
