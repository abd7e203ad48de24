"""report: append findings to the violation ring and count them, as the kernels do with atomics."""

from collections.abc import Mapping

import torch
from torch import Tensor

from canary_core.ops.state import Shared
from canary_core.records import KIND_ROWS, KINDS_DRAINED, ROW_WORDS, Counter, Row


def report(shared: Shared, kind: int, slot: Tensor, fields: Mapping[Row, Tensor | int]) -> None:
    """Counts one finding per entry of ``slot`` (int64 ``[n]``) and keeps as many as the ring has room for, and the
    first of each kind. The other fields are of the same shape or one number for all; `SEQUENCE`, `KIND` and `SLOT` are
    filled in."""
    count = slot.shape[0]
    if count == 0:
        return
    counters = shared.counters
    first, drained = int(counters[Counter.ROWS]), int(counters[Counter.DRAINED])
    first_of_kind, kind_drained = int(counters[kind]), int(counters[KINDS_DRAINED + kind])
    counters[kind] += count
    counters[Counter.ROWS] += count
    rows = torch.full((count, ROW_WORDS), -1, dtype=torch.int64, device=slot.device)
    for word, value in fields.items():
        rows[:, word] = value
    sequence = first + torch.arange(count, device=slot.device)
    rows[:, Row.SEQUENCE] = sequence + 1
    rows[:, Row.KIND] = int(kind)
    rows[:, Row.SLOT] = slot
    of_kind = sequence - first + first_of_kind
    in_ring = sequence - drained < shared.ring_rows
    behind = shared.ring_rows + kind * KIND_ROWS + of_kind % KIND_ROWS
    kept = in_ring | (of_kind - kind_drained < KIND_ROWS)
    shared.ring[torch.where(in_ring, sequence % shared.ring_rows, behind)[kept]] = rows[kept]
