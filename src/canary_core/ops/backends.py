"""The two back ends: the same ops in vectorised torch and in Triton. The choice is explicit and reported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.errors import ConfigError
from canary_core.ops.state import RegionState

if TYPE_CHECKING:
    from canary_core.ops.blocks import BlockShape
    from canary_core.ops.compile_process import CompileProcess
    from canary_core.ops.weights import WeightTable
    from canary_core.read_table import ReadTable
    from canary_core.recomputer import Computed

BatchOp = Callable[[RegionState, BatchView, SlotTable], None]
EventOp = Callable[[RegionState, Tensor, int | Tensor, int], None]
NoteOp = Callable[[RegionState, Tensor, int, int | Tensor], None]


@dataclass(frozen=True, slots=True)
class Backend:
    """The ops in the order of a step: `fingerprint_record` stands for the two ops before it where nothing comes
    between. `baseline` runs once, at attach; `verify` and `adopt` where bytes arrive, with records or without; `repair`
    where one word of a parked slot was flipped; `note`
    where the content of slots changes without a forward; `gather_blocks` for the ledger; `compare_tables` once
    attention has its tables (last argument: whether to wait for a compiler; returns whether the op was launched);
    `note_store` after a layer has stored its KV, and `compare_stores` before `record`; `compare_weights` after a
    forward; `compare_kv` where somebody has the KV of a request computed again."""

    name: str
    baseline: Callable[[RegionState], None]
    check: BatchOp
    read_check: BatchOp
    fingerprint: BatchOp
    record: BatchOp
    fingerprint_record: BatchOp
    scrub: Callable[[RegionState, bool], None]
    alloc: EventOp
    park: EventOp
    share: EventOp
    evict: EventOp
    free: EventOp
    verify: Callable[[RegionState, Tensor, int], None]
    adopt: Callable[[RegionState, Tensor], None]
    repair: Callable[[RegionState, Tensor], None]
    note: NoteOp
    gather_blocks: "Callable[[RegionState, Tensor, BlockShape, Tensor, int], None]"
    compare_tables: Callable[[RegionState, "ReadTable", Sequence[int], bool], bool]
    note_store: Callable[[RegionState, BatchView, Sequence[int]], None]
    compare_stores: BatchOp
    compare_weights: "Callable[[RegionState, WeightTable, int, int], None]"
    compare_kv: "Callable[[RegionState, Sequence[int], Tensor, Computed, Tensor], None]"
    row_steps: tuple[int, ...] = ()
    """Upper bounds of rows: batches up to the same bound share compiled kernels; empty where nothing is compiled."""
    compile_together: Callable[[Callable[[], None]], None] | None = None
    """Compiles the ops called by a function, side by side, and launches none of them."""
    compile_beside: "Callable[[Callable[[], None], Sequence[CompileProcess]], CompileProcess | None] | None" = None
    """The same in a process; None where the given ones have all. Raises `OSError` where none can start."""


def choose(name: str, device: torch.device) -> Backend:
    """The back end called ``name`` (``auto``: triton for a pool on a GPU, else torch) for pools on ``device``. Raises
    `ConfigError` if it can't run there."""
    if name == "auto":
        name = "torch" if device.type == "cpu" else "triton"
    if name == "torch":
        if device.type != "cpu":
            raise ConfigError(f"CANARY_BACKEND=torch is for pools on the CPU, got one on {device}; use triton")
        return torch_backend()
    try:
        return triton_backend()
    except ImportError as error:
        raise ConfigError(f"CANARY_BACKEND=triton needs triton, which does not import: {error}") from error


def torch_backend() -> Backend:
    """The vectorised reference; for pools on any device, but meant for the CPU: it allocates and reads back."""
    return Backend(name="torch", **_ops("torch"))


def triton_backend() -> Backend:
    """The kernels; on the CPU only where ``TRITON_INTERPRET=1`` was set before triton was imported."""
    from canary_core.ops.kernels import launch

    return Backend(
        name="triton",
        **_ops("kernels"),
        row_steps=launch.ROW_STEPS,
        compile_together=launch.compile_together,
        compile_beside=launch.compile_beside,
    )


_FILES = {
    "baseline": "fingerprint",
    "check": "check",
    "read_check": "read_check",
    "fingerprint": "fingerprint",
    "record": "record",
    "fingerprint_record": "fingerprint_record",
    "scrub": "scrub",
    "alloc": "lifetime",
    "park": "lifetime",
    "share": "lifetime",
    "evict": "lifetime",
    "free": "lifetime",
    "verify": "verify",
    "adopt": "blocks",
    "repair": "repair",
    "note": "histories",
    "gather_blocks": "blocks",
    "compare_tables": "tables",
    "note_store": "stores",
    "compare_stores": "stores",
    "compare_weights": "weights",
    "compare_kv": "compare_kv",
}
"""Ops, and the file of each in ``ops/torch`` and in ``ops/kernels``."""


def _ops(room: str) -> dict[str, Any]:
    return {op: getattr(import_module(f"canary_core.ops.{room}.{file}"), op) for op, file in _FILES.items()}
