"""What SGLang's attention backends make of random batches, in the buffers of CUDA graphs without a graph too."""

import random
from types import SimpleNamespace
from typing import Any

import torch
from canary_sglang.compat import attention
from engines import fake_flashinfer
from torch import Tensor

BATCHES = (1, 2, 4, 8)
"""Rows of the graphs that are captured, in this order."""


class EagleVerifyInput(SimpleNamespace):
    """By its name, drafted tokens without branches."""

    ragged_verify_layout, draft_token_num = None, 4


def graph_tables(engine: Any, mode: str, graph: bool, paged: bool = False, name: str = "") -> dict[str, Any]:
    """The backend's own methods that prepare a forward are called as SGLang does, for random batches of ``mode``
    (``DECODE``, ``TARGET_VERIFY``, ``EXTEND``). With ``graph`` those for graphs, in a capture of each size first, then
    with padded rows, the next batch longer or shorter. Req_to_token and the map of window slots have random slots, in
    pages. ``name``: ``flashinfer`` for a backend of that kind in place of the engine's, whose extends read all
    positions through the list if ``paged``; ``prefill_aware`` for FlashAttention-3 as it is for models that never
    forget a prompt.

    Gives how many entries of each table that `attention.made` yields were looked at, and how many of them differ from
    what those two say; and of lengths how many were looked at, and how many are not the rows' own. The engine is not
    fit for anything else afterwards."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rng, runner, kind = random.Random(3), engine.runner, ForwardMode[mode]
    backend = fake_flashinfer.backend(runner) if name == "flashinfer" else runner.attn_backend
    backend.use_paged = paged
    if name == "prefill_aware":
        backend.is_prefill_aware_swa, backend._pa_swa_max_prefill_len, backend.sliding_window_size = True, 0, 16
        backend._pa_swa_prefill_lens = torch.zeros(len(runner.req_to_token_pool.req_to_token), dtype=torch.int32)
    table, window = fill(runner)
    # A graph for prompts has one number of rows.
    sizes = BATCHES[-1:] if mode == "EXTEND" else BATCHES
    # As for a server that speculates: so many tokens are verified, without branches.
    backend.speculative_num_draft_tokens = 4
    if graph:
        backend.init_cuda_graph_state(BATCHES[-1], BATCHES[-1] * 8)
        for rows in sizes:
            backend.init_forward_metadata_out_graph(batch_of([], rows, kind), in_capture=True)
    seen: dict[str, list[int]] = {}
    lens: dict[str, list[int]] = {}
    for _ in range(20):
        rows = rng.choice(sizes)
        live = min(rng.randrange(rows // 2, rows) + 1, table.shape[0] - 1)
        longest = table.shape[1] - 8
        lengths = [
            (request, rng.choice((rng.randrange(1, 40), rng.randrange(1, longest))))
            for request in rng.sample(range(1, table.shape[0]), live)
        ]
        batch = batch_of(lengths, rows if graph else live, kind)
        if graph:
            backend.init_forward_metadata_out_graph(batch, in_capture=False)
        else:
            backend.init_forward_metadata(batch)
        ends = batch.extend_prefix_lens if mode == "EXTEND" else batch.seq_lens
        for made in attention.made(backend, graph, batch):
            looked, wrong = seen.setdefault(made.name, [0, 0])
            for row, (request, _) in enumerate(lengths):
                end = int(ends[row])
                places = torch.arange(max(end - made.window_tokens, 0) if made.window_tokens else 0, end)
                right = table[request, places].long()
                if made.own_slots:
                    right = window[right].long()
                looked, wrong = looked + len(places), wrong + int((named(made, row, places) != right).sum())
            seen[made.name] = [looked, wrong]
            for given in made.lens:
                right = lens_of(given.of, batch, live, made.window_tokens)
                numbers = given.given.diff() if given.begins else given.given
                looked, wrong = lens.setdefault(given.name, [0, 0])
                lens[given.name] = [looked + live, wrong + int((numbers[:live] != right).sum())]
    return {
        "lens": lens,
        "seen": seen,
        "why_not": attention.why_not(backend),
        "leaves": [*attention.leaves(backend)] == [backend],
    }


def lens_of(of: str, batch: Any, rows: int, window: int | None) -> Tensor:
    """What lengths that are ``of`` something must be, by the batch as SGLang's kernels understand it."""
    mode = batch.forward_mode.name
    new = batch.extend_seq_lens if mode == "EXTEND" else torch.full_like(batch.seq_lens, 4 if "VERIFY" in mode else 1)
    before = {"EXTEND": batch.extend_prefix_lens, "DECODE": batch.seq_lens - 1}.get(mode, batch.seq_lens)
    read = before + 1 if mode == "DECODE" else before
    cut = read if window is None else read.clamp(max=window)
    return {"new": new, "whole": before + new, "read": cut, "rest": cut + new}[of][:rows]


def fill(runner: Any) -> tuple[Tensor, Tensor]:
    """Random pages in req_to_token and, if there is one, in the map of window slots; gives both."""
    table, size = runner.req_to_token_pool.req_to_token, runner.page_size
    generator = torch.Generator().manual_seed(3)
    several = (table.shape[0], table.shape[1] // size + 1)
    pages = torch.randint(1, runner.max_total_num_tokens // size, several, generator=generator)
    slots = (pages[..., None] * size + torch.arange(size)).flatten(1)
    table.copy_(slots[:, : table.shape[1]])
    window = getattr(runner.token_to_kv_pool, "full_to_swa_index_mapping", None)
    if window is None:
        return table, table
    other = torch.randperm(len(window) // size, generator=generator)
    moved = (other[:, None] * size + torch.arange(size)).flatten()
    window[: len(moved)] = moved.to(window.dtype)
    return table, window


def named(made: Any, row: int, places: Tensor) -> Tensor:
    """The slots that a table names for these positions of a row; a list of a window begins with the first of them."""
    if isinstance(made, attention.Pages):
        return made.entries[row, places // made.page_size].long() * made.page_size + places % made.page_size
    begin = int(made.starts[row])
    return made.entries[begin : begin + len(places)].long()


def batch_of(lengths: list[tuple[int, int]], rows: int, mode: Any) -> Any:
    """What of a forward's batch a backend looks at: these requests, and padding up to ``rows``."""
    padded = [*lengths, *([(0, 1)] * (rows - len(lengths)))]
    ends = torch.tensor([length for _, length in padded])
    extended = torch.minimum(ends, 1 + ends % 7)
    tokens = {"DECODE": rows, "TARGET_VERIFY": 4 * rows, "EXTEND": int(extended.sum()) if lengths else 8 * rows}
    count = tokens[mode.name]
    return SimpleNamespace(
        forward_mode=mode, batch_size=rows, req_pool_indices=torch.tensor([row for row, _ in padded]), seq_lens=ends,
        seq_lens_cpu=ends, seq_lens_sum=int(ends.sum()), encoder_lens=None, positions=torch.zeros(count),
        spec_info=EagleVerifyInput() if mode.name == "TARGET_VERIFY" else None,
        extend_seq_lens=extended, extend_seq_lens_cpu=extended.tolist(), extend_prefix_lens=ends - extended,
        extend_prefix_lens_cpu=(ends - extended).tolist(), out_cache_loc=torch.ones(count, dtype=torch.int64),
        cross_attention_custom_mask=None,
    )  # fmt: skip
