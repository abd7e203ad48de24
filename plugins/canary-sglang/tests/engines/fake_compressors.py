"""DeepSeek-V4's compressors, as far as their rings go: which rows a forward stores, and which it reads, as SGLang's
planner (``c_plan.cuh``) and kernels (``c4_v2.cuh``, ``c128_v2.cuh``) have it, written down once more."""

from typing import Any

import torch
from torch import Tensor

READ = {"rows": 0, "misread": 0}
"""Rows that compressors have read so far, and those of them that did not hold the token that they should."""


def run(runner: Any, batch: Any) -> None:
    """One forward: completes groups with what the rings hold, and stores what later forwards need."""
    decode = not batch.forward_mode.is_extend()
    news = [1] * batch.batch_size if decode else batch.extend_seq_lens.tolist()
    first = 0
    for request, end, new in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), news, strict=True):
        tokens = batch.input_ids[first : first + new].long()
        pool = runner.token_to_kv_pool
        for states in (pool.compress_state_pools, pool.indexer_compress_state_pools):
            for layer, state in enumerate(states):
                if state is not None:
                    positions = torch.arange(max(end - new - 256, 0), end)
                    where = _rows(runner, state, request, positions)
                    rows = state.kv_score_buffer.kv_score
                    _read(state.ratio, rows, dict(zip(positions.tolist(), where.tolist(), strict=True)), end - new, end)
                    _store(state, rows, where[-new:], (positions[-new:], tokens, layer), int(pool.swa_page_size))
        first += new


def _rows(runner: Any, state: Any, request: int, positions: Tensor) -> Tensor:
    if state.ratio == 128:
        return request * state.ring_size + positions % state.ring_size
    pool = runner.token_to_kv_pool
    slots = pool.full_to_swa_index_mapping[runner.req_to_token_pool.req_to_token[request, positions].long()]
    return slots // pool.swa_page_size * state.ring_size + slots % state.ring_size


def _read(ratio: int, rows: Tensor, where: dict[int, int], prefix: int, end: int) -> None:
    window = 8 if ratio == 4 else 128
    for last in range(prefix, end):
        buffered = window - min(last - prefix + 1, window)
        if (last + 1) % ratio or not buffered:
            continue
        needed = [position for position in range(last + 1 - window, last + 1)[:buffered] if position >= 0]
        held = rows[torch.tensor([where[position] for position in needed], dtype=torch.long), 0].tolist()
        READ["rows"] += len(needed)
        READ["misread"] += sum(a != b for a, b in zip(needed, held, strict=True))


def _store(state: Any, rows: Tensor, where: Tensor, what: tuple[Tensor, Tensor, int], page: int) -> None:
    positions, tokens, layer = what
    overlap = 4 if state.ratio == 4 else 0
    end = int(positions[-1]) + 1
    kept = positions >= end // state.ratio * state.ratio - overlap
    if overlap:
        kept |= positions % page >= page - overlap
    mark = (positions * 256 + tokens)[kept, None] * (2 * torch.arange(rows.shape[1]) + 1 + layer) % 4093
    mark[:, 0] = positions[kept]
    rows[where[kept]] = mark.to(rows.dtype)
