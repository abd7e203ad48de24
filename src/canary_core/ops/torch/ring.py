"""report: append findings to the violation ring and count them, as the kernels do with atomics."""

from collections.abc import Mapping

import torch
from torch import Tensor

from canary_core.ops.state import Shared
from canary_core.records import ROW_WORDS, Counter, Row


def report(shared: Shared, kind: int, slot: Tensor, fields: Mapping[Row, Tensor | int]) -> None:
    """Counts one finding per entry of ``slot`` (int64 ``[n]``) and keeps as many as the ring has room for. The other
    fields are of the same shape or one number for all; `SEQUENCE`, `KIND` and `SLOT` are filled in."""
    count = slot.shape[0]
    if count == 0:
        return
    counters = shared.counters
    first, drained = int(counters[Counter.ROWS]), int(counters[Counter.DRAINED])
    counters[kind] += count
    counters[Counter.ROWS] += count
    rows = torch.full((count, ROW_WORDS), -1, dtype=torch.int64, device=slot.device)
    for word, value in fields.items():
        rows[:, word] = value
    sequence = first + torch.arange(count, device=slot.device)
    rows[:, Row.SEQUENCE] = sequence + 1
    rows[:, Row.KIND] = int(kind)
    rows[:, Row.SLOT] = slot
    kept = sequence - drained < shared.ring.shape[0]
    shared.ring[sequence[kept] % shared.ring.shape[0]] = rows[kept]
