"""Compiles every kernel for a GPU that need not be there: ``python tests/ops/compile_script.py FIRST END``, for the
layouts of `scenario` with these seeds.

The interpreter runs what no compiler takes: a variable that changes its shape in a loop, a missing constant. Prints, as
JSON, how often each kernel was compiled. In a process of its own, since Triton decides once whether it interprets.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from ops.scenario import Scenario, blocks, events, history, notes, ownership, read_table, scenario
from ops.test_compare_kv import setting
from triton.backends.compiler import GPUTarget

from canary_core.ops.backends import triton_backend
from canary_core.ops.kernels import blocks as block_kernels
from canary_core.ops.kernels import (
    check,
    compare_kv,
    fingerprint,
    fingerprint_record,
    histories,
    launch,
    lifetime,
    read_check,
    record,
    repair,
    scrub,
    stores,
    tables,
    verify,
    weights,
)
from canary_core.ops.repair_rows import REPAIR_WORDS
from canary_core.ops.weights import WeightRange, WeightTable
from canary_core.records import BLOCK_VALUES

ROOMS = (
    check, read_check, fingerprint, fingerprint_record, lifetime, record, scrub, verify, stores, block_kernels,
    histories, tables, repair, weights, compare_kv,
)  # fmt: skip
EVENTS = ("alloc", "park", "share", "evict", "free")


class AbsentGPU:
    """What Triton asks its driver before it compiles: an H100 or H200 (compute capability 9.0)."""

    def get_current_target(self) -> GPUTarget:
        """Of the device that there is not."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Its number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """No stream."""
        return 0


def compile_all(s: Scenario) -> None:
    """Every op of a region."""
    backend: Any = triton_backend()
    state = s.state(read_check=-1)
    batch, table = history(s, steps=1)[0]
    state.require_capacity(batch)
    if state.sources:
        backend.baseline(state)
    for op in ("check", "read_check", "fingerprint", "record", "fingerprint_record"):
        getattr(backend, op)(state, batch, table)
    if state.stores.numel():
        backend.note_store(state, batch, range(len(state.sources)))
        backend.compare_stores(state, batch, table)
    backend.scrub(state, False)
    backend.scrub(state, True)
    for op in ("verify", "adopt"):
        getattr(backend, op)(state, events(s))
    for op in EVENTS:
        getattr(backend, op)(state, *ownership(s))
    backend.note(state, *notes(s))
    backend.repair(state, torch.zeros((1, REPAIR_WORDS), dtype=torch.int64))
    content = torch.zeros(300, dtype=torch.uint8)
    ranges = [WeightRange(content.data_ptr(), 300, lambda: content)]
    backend.compare_weights(state, WeightTable(ranges, content.device, state.sources.fingerprint_keys), 0, 2)
    backend.compare_tables(state, read_table(s, batch, table), (0, 0, 0), True)
    for block, slots in blocks(s, table):
        rows = torch.zeros((block.blocks(len(slots)), BLOCK_VALUES + len(state.sources)), dtype=torch.int64)
        backend.gather_blocks(state, slots, block, rows, 0)


def main() -> None:
    """Prints the numbers."""
    triton.runtime.driver.set_active(AbsentGPU())
    # Whatever would be launched is compiled only.
    launch._instead.set(launch.Launcher.warm_up)
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        compile_all(scenario(seed))
    state, slots, computed = setting(0, "cpu")
    columns = range(len(computed.sources))
    triton_backend().compare_kv(state, columns, slots, computed, torch.zeros(2, len(columns), len(slots)))
    kernels = [k for room in ROOMS for k in vars(room).values() if isinstance(k, triton.runtime.jit.JITFunction)]
    compiled = {k.__name__: sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels}
    sys.stdout.write(json.dumps({name: count for name, count in compiled.items() if name.endswith("_kernel")}) + "\n")


if __name__ == "__main__":
    main()
