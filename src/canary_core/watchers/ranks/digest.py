"""`forward_digest`: one forward as a few sums, the same on all ranks that compute the same; `RankWord`: their order."""

from enum import IntEnum

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.ops.hashing import weights
from canary_core.ops.state import RegionState
from canary_core.records import FIRST_CONTENT, Status

MOST_TOKENS, MOST_KV_TOKENS = 8192, 512
"""New tokens, and rows, of a forward in its digest; and those with KV in it. Later ones are left out."""

MOST_SOURCES = 512
"""Fingerprints of a slot with KV in the digest; later ones are left out."""


class RankWord(IntEnum):
    """Word of one rank's row for one forward (int64 each). Sums are of products with odd weights, by place in the
    batch: any single other value makes another sum."""

    CHECKSUM = 0
    """Of the rest; never 0."""
    NUMBER = 1
    """Of the forward, the same on all ranks."""
    STEP = 2
    """The rank's own number of the forward."""
    CONDITIONS = 3
    """Changes of the weights known to the rank, and whether content stands in the place of tokens; 0 for neither."""
    SAMPLES = 4
    """How often sampled tokens were given for the forward: 0 or 1."""
    SAMPLED = 5
    """Sum of the sampled tokens."""
    LENGTHS = 6
    """Sum of each row's tokens in the cache and new ones."""
    POSITIONS = 7
    TOKENS = 8
    SLOTS = 9
    HISTORY = 10
    """Sum of the prefix hashes before the rows' new tokens: of all tokens that requests had computed until then."""
    HISTORY_UNKNOWN = 11
    """Sum of the weights of rows without a known prefix hash."""
    NEW = 12
    """How many new tokens there are."""
    KV_UNKNOWN = 13
    """How many of the new tokens' fingerprints are unknown."""
    KV = 14
    """Of each of `SourceTable.judged`, sum of the fingerprints of the new tokens' slots."""


FIRST_OF_DEVICE = RankWord.LENGTHS
"""Words from here on are made on the device."""


def digest_weights(device: torch.device) -> Tensor:
    """The odd weights of `forward_digest`, int64 ``[2, MOST_TOKENS]``."""
    return weights(2 * MOST_TOKENS, device).view(2, MOST_TOKENS)


def forward_digest(state: RegionState, view: BatchView, odd: Tensor, contents: bool) -> Tensor:
    """The words of a row from `FIRST_OF_DEVICE` on, int64: of the forward of ``view``, just recorded in the region of
    ``state``, on the stream of the record. ``odd``: `digest_weights`. ``contents``: numbers may stand in the place of
    tokens, each rank's own. Some small launches; nothing waits. Reads no memory of the engine beyond that of a late
    record."""
    count, rows = min(view.tokens, MOST_TOKENS), min(view.rows, MOST_TOKENS)
    word, slot, position = state.scratch.plan[:count, :3].unbind(1)
    first, second = odd[:, :count] * (word != 0)
    tokens = view.token_ids[:count].long()
    if contents:
        tokens = tokens * (tokens < FIRST_CONTENT)
    prefix, new = view.prefix_lens[:rows].long(), view.new_lens[:rows].long()
    positions = position if view.positions is None else position + view.positions[:count] * second
    heads, live = state.scratch.heads[:rows], new > 0
    kv = min(count, MOST_KV_TOKENS)
    usable = (word[:kv] >> 32) == Status.OK + 1
    prints = state.fingerprints[slot[:kv] * usable][:, state.sources.firsts]  # [tokens, judged]
    sums = (
        (prefix * odd[0, :rows] + new * odd[1, :rows]).sum() + (word * second).sum(),
        (positions * first).sum(),
        (tokens * first).sum(),
        (slot * first).sum(),
        (heads * live * odd[0, :rows]).sum(),
        ((heads == 0) * live * odd[0, :rows]).sum(),
        new.sum(),
        ((prints == 0) * usable[:, None]).sum(),
    )
    return torch.cat((torch.stack(sums), (prints * (first[:kv] * usable)[:, None]).sum(0)))


def sampled_digest(tokens: Tensor, without: tuple[int, ...], odd: Tensor) -> Tensor:
    """Sum of the sampled ``tokens``, int64 ``[]``; in the form of `SampledTokens.give`, with at most `MOST_TOKENS` rows
    and columns. ``odd``: see `forward_digest`."""
    by_row = odd[0, : tokens.shape[0]]
    if without:
        by_row = by_row.clone()
        for row in without:
            by_row[row].fill_(0)
    if tokens.dim() == 1:
        return (tokens * by_row).sum()
    return (tokens * by_row[:, None] * odd[1, : tokens.shape[1]]).sum()
