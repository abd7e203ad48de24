"""DeepSeek-V4's compressor states: the input of the compressors, for tokens of an incomplete group. They are the
regions ``c4_state`` and ``c128_state``. A token has a row in a ring, with its K (``kv.N``) and its score (``score.N``)
in each layer N; in c4 layers also the K and the score of the indexer (``index_kv.N``, ``index_score.N``).

| region       | one ring for each  | row of position ``p``       | a forward that completes a group reads           |
|--------------|--------------------|-----------------------------|--------------------------------------------------|
| `c4_state`   | page of the window | ``page * 8 + p % 8``        | the group so far, and the four tokens before it  |
| `c128_state` | request            | ``request * 128 + p % 128`` | the group so far                                 |

Source: SGLang's ``c_plan.cuh`` (rows stored and read), ``c4_v2.cuh`` and ``c128_v2.cuh``, in agreement from 0.5.15 to
0.5.23 without speculative decoding. A request after a cached prefix begins at a page boundary. It reads the last four
c4 rows of the page before, unchanged while the page is cached, and no c128 row. Only the compressors write to the
rings; with another writer, the rings are not guarded (`compressor_state_refusal`).

A prefill stores only rows for later reads, and some more; the number depends on the release. So every row within reach
of one of its tokens counts as written, with its bytes after the forward. Some of the rows may not have changed, so lost
writes are not judged here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canary_adapters import Part, RegionPool, block_table, ring_table, row_source
from canary_core import (
    AttachError,
    BatchView,
    Canary,
    KVSource,
    Region,
    RegionKind,
    Role,
    StepListener,
    Uncovered,
)
from canary_sglang.compat import batches
from canary_sglang.pools.parts import storage_bytes

C4, C128 = "c4_state", "c128_state"

C4_ROWS, C128_ROWS = 8, 128
"""Rows of a ring without speculative decoding."""

NULL_ROW = 0
"""The first row of page 0 and of request 0, both padding."""


def by_region(pool: Any) -> dict[str, list[Any]]:
    """The compressor state pools of a `DeepSeekV4TokenToKVPool`, by the name of their region. A region with another
    name than `C4` and `C128` can't be guarded."""
    found: dict[str, list[Any]] = {}
    for name in ("compress_state_pools", "indexer_compress_state_pools"):
        for state in getattr(pool, name, None) or ():
            if state is not None:
                found.setdefault(f"c{state.ratio}_state", []).append(state)
    return found


def compressor_state_pool(name: str, pool: Any) -> RegionPool:
    """The region ``name`` of `by_region`. Rows that belong to no ring are left out. Raises `AttachError` if the pool is
    not as expected."""
    describe = {C4: _c4_region, C128: _c128_region}.get(name)
    if describe is None:
        raise AttachError("a compressor that is not described")
    region = describe(pool)
    return RegionPool(region, _rows_beyond(region))


def _rows_beyond(region: Region) -> list[Uncovered]:
    """Memory behind the last slot of ``region``, by storage."""
    ends: dict[int, int] = {}
    tensors = {}
    for source in region.sources:
        start = source.tensor.untyped_storage().data_ptr()
        end = source.tensor.data_ptr() - start + source.reach_bytes(region.slots)
        ends[start] = max(ends.get(start, 0), end)
        tensors[start] = source.tensor
    wholes = {start: storage_bytes(tensor) for start, tensor in tensors.items()}
    rests = (wholes[start][end:] for start, end in ends.items())
    reason = "rows that no page and no request has"
    return [Uncovered(f"{region.name}/rest", rest.nbytes, reason, rest) for rest in rests if rest.nbytes]


class RequestCompressorStates(StepListener):
    """Adds the requests' rings, the region ``name`` of ``canary``, to the view of each forward."""

    def __init__(self, name: str, canary: Canary) -> None:
        self.region = name
        self._canary = canary
        region = canary.regions[name]
        self._entries = torch.arange(region.slots // C128_ROWS, dtype=torch.int32, device=region.device)[:, None]
        self._inside = torch.arange(C128_ROWS, device=region.device)

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """Adds the rings of the forward's requests."""
        return view if view is None or batch is None else self._with_rings(view, batch.req_pool_indices)

    def padding(self, view: BatchView) -> list[BatchView]:
        """``view``, with only padding, with the padding's ring in each row."""
        return [self._with_rings(view, view.prefix_lens.new_zeros(view.rows, dtype=torch.int64))]

    def forget(self, batch: Any) -> None:
        """The forward may have written rows of its requests."""
        if batches.writes_kv(batch):
            rows = batch.req_pool_indices.long()[:, None] * C128_ROWS + self._inside
            self._canary.slots.forget(self.region, rows.flatten())

    def _with_rings(self, view: BatchView, requests: Tensor) -> BatchView:
        table = ring_table(block_table(self._entries, C128_ROWS, requests), C128_ROWS)
        return replace(view, tables={**view.tables, self.region: table})


def _c4_region(pool: Any) -> Region:
    """The rings of the window's pages."""
    window, size = pool.swa_kv_pool, int(pool.swa_page_size)
    slot_map = pool.full_to_swa_index_mapping
    if getattr(pool, "swa_req_ring_size", None) is not None or slot_map is None or int(window.page_size) != size:
        raise AttachError("the window is not one of pages that a map gives")
    sources = [
        *_sources(_of_ratio(pool.compress_state_pools, 4), C4_ROWS),
        *_sources(_of_ratio(pool.indexer_compress_state_pools, 4), C4_ROWS, "index_"),
    ]
    pages = min(buffer.shape[0] for buffer in window.kv_buffer)
    return Region(
        C4,
        pages * C4_ROWS,
        tuple(sources),
        RegionKind.RING,
        slot_map=slot_map,
        null_slot=NULL_ROW,
        group_tokens=4,
        overlap_tokens=4,
        page_ring=(size, C4_ROWS),
    )


def _c128_region(pool: Any) -> Region:
    """The requests' rings."""
    states = _of_ratio(pool.compress_state_pools, 128)
    if not all(hasattr(state, "translate_from_req_position_to_state_loc") for _, state in states):
        raise AttachError("a release in which they are not the requests'")
    sources = _sources(states, C128_ROWS)
    slots = int(pool.num_req_slots) * C128_ROWS
    return Region(C128, slots, tuple(sources), RegionKind.RING, null_slot=NULL_ROW, group_tokens=128)


def _of_ratio(pools: Sequence[Any], ratio: int) -> list[tuple[int, Any]]:
    """Layers with a compressor of ``ratio`` tokens an entry, each with the `CompressStatePool`."""
    return [(layer, state) for layer, state in enumerate(pools) if state is not None and state.ratio == ratio]


def _sources(states: Sequence[tuple[int, Any]], ring_rows: int, half: str = "") -> list[KVSource]:
    """K and score of each layer. ``half``: the prefix of their names."""
    sources = []
    for layer, state in states:
        rows: Tensor = state.kv_score_buffer.kv_score
        kind = type(state).__name__
        if kind != "CompressStatePool" or state.ring_size != ring_rows or rows.dim() != 2 or rows.shape[1] % 2:
            raise AttachError(
                f"{kind} with rings of {state.ring_size} rows of shape {tuple(rows.shape)} in layer {layer}"
            )
        for name, part in zip(("kv", "score"), rows.chunk(2, dim=1), strict=True):
            # Rows that were never written may hold any bytes, so they are not checked for non-finite numbers.
            source = row_source(part, Part(f"{half}{name}", layer, role=Role.STATE))
            sources.append(replace(source, dtype=None))
    if not sources:
        raise AttachError("there are none")
    return sources
