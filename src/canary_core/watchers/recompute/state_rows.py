"""Recurrent states as rows of numbers, which are compared as tokens are."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from canary_core.region import KVSource, Region, RegionKind, Role
from canary_core.watchers.recompute.noise import WINDOW_TOKENS


def holds_states(region: Region) -> bool:
    """Whether the slots of ``region`` are recurrent states, or rows of some, and no tokens."""
    return region.kind is RegionKind.STATE or any(source.role is Role.STATE for source in region.sources)


def by_rows(sources: Sequence[KVSource]) -> Iterator[tuple[int, tuple[KVSource, ...]]]:
    """Those of ``sources``, whose slots are whole states, that have as many rows of numbers: how many, and the sources
    with a slot for each row. None for fewer rows than a verdict takes, or for a state in several pieces."""
    found: dict[int, list[KVSource]] = defaultdict(list)
    for source in sources:
        rows, row = _row(source)
        if rows >= WINDOW_TOKENS:
            found[rows].append(row)
    for rows, alike in found.items():
        yield rows, tuple(alike)


def row_slots(states: Tensor, rows: int) -> Tensor:
    """The slots of all rows of ``states``, integer ``[n]``: ``[n * rows]``."""
    slots = states[:, None] * rows + torch.arange(rows, device=states.device)
    return torch.where(states[:, None] >= 0, slots, -1).flatten()


def _row(source: KVSource) -> tuple[int, KVSource]:
    """Number of rows, and the source of rows: the last dimension of the tensor, or halves of it, as long as there are
    fewer than a verdict takes. 0 rows for what can't be divided so."""
    state = source.tensor[0]
    size = state.element_size()
    if source.chunks != 1 or source.page_size != 1 or state.numel() * size != source.chunk_bytes:
        return 0, source
    width = state.shape[-1]
    while state.numel() // width < WINDOW_TOKENS and width % 2 == 0:
        width //= 2
    rows, size = state.numel() // width, width * size
    return rows, replace(
        source, chunk_bytes=size, slot_stride_bytes=size, page_size=rows, page_stride_bytes=source.slot_stride_bytes,
        present=None, role=Role.STATE,
    )  # fmt: skip
