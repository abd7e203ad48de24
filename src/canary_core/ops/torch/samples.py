"""Sampled tokens: `check` takes them over, `record` compares the next forward's tokens with them.

A token is compared when a forward computes it, and once more while among the last tokens read: so two errors are seen,
a forward fed with another token, and slots of a request continued with a token never sampled.
"""

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.mapping import int64_words, see
from canary_core.ops.samples import Samples
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan
from canary_core.records import (
    NO_SAMPLE,
    NOT_SAMPLED,
    SAMPLE_POSITION_BITS,
    SAMPLE_TOKEN_BITS,
    SAMPLE_TOKENS,
    SAMPLE_WRITER_BITS,
    SAMPLE_WRITERS,
    STEP_WRITTEN,
)

TOKENS, POSITIONS, WRITERS = 1 << SAMPLE_TOKEN_BITS, 1 << SAMPLE_POSITION_BITS, 1 << SAMPLE_WRITER_BITS
WRITER_SHIFT = SAMPLE_TOKEN_BITS + SAMPLE_POSITION_BITS


def remember(samples: Samples) -> None:
    """Takes over the tokens given for the last forward, and empties `Samples.given`. A position without a sampled token
    forgets an earlier one: the request goes on with an unknown token. A request with a sampled token has none yet after
    the row's last position: what was sampled there before it was computed anew, as of a batch under way when the
    request was retracted, is forgotten."""
    rows = int(samples.ends[0])
    end, given = samples.ends[1 : 1 + rows], samples.given[:, :rows]
    goes_on = (end != 0) & ((given >= 0) & (given < TOKENS)).any(0)
    for back in range(SAMPLE_TOKENS):
        token = given[SAMPLE_TOKENS - 1 - back]
        position = (end >> SAMPLE_TOKEN_BITS) % POSITIONS - back
        kept = _kept(end >> WRITER_SHIFT, position)
        known = samples.table[kept]
        later = goes_on & (known >= end + TOKENS) & (known >> WRITER_SHIFT == end >> WRITER_SHIFT)
        sample = torch.where((token >= 0) & (token < TOKENS), end - (back << SAMPLE_TOKEN_BITS) + token, 0)
        said = (end != 0) & (position > 0) & (token != NOT_SAMPLED)
        samples.table[kept[later]] = 0
        samples.table[kept[said]] = sample[said]
    given.fill_(NOT_SAMPLED)
    given[-1].fill_(NO_SAMPLE)


def note_tails(samples: Samples, state: RegionState, batch: BatchView, rows: plan.Rows, table: SlotTable) -> None:
    """Notes the content of the last slots read by each row, while the table still names them; see `TAIL_WORDS`."""
    row = torch.arange(batch.rows, device=batch.device).repeat_interleave(SAMPLE_TOKENS)
    position = rows.prefix[row] - SAMPLE_TOKENS + torch.arange(SAMPLE_TOKENS, device=batch.device).repeat(batch.rows)
    read = position >= rows.read_first[row].clamp(min=1)
    seen = see(state, *plan.lookup(state.region, table, plan.Places(row, torch.where(read, position, 0))))
    holds = read & seen.holds(position) & (position < POSITIONS) & (seen.token >= 0) & (seen.token < TOKENS)
    written = int64_words(state.records[torch.where(holds, seen.slot, 0)], STEP_WRITTEN)
    tails = samples.tails[: batch.rows].view(-1, samples.tails.shape[2])
    tails[:, 0] = torch.where(holds, position << SAMPLE_TOKEN_BITS | seen.token, 0)
    tails[:, 1] = torch.where(holds, seen.slot, -1)
    tails[:, 2] = torch.where(holds, written, -1)


def sampled(samples: Samples, writer: Tensor, position: Tensor) -> Tensor:
    """The token sampled for ``writer`` at each ``position``, -1 where unknown; int64 ``[n]``."""
    known = (writer >= 0) & (position > 0) & (position < POSITIONS)
    sample = samples.table[_kept(writer.clamp(min=0), torch.where(known, position, 0))]
    own = writer.clamp(min=0) % WRITERS << SAMPLE_POSITION_BITS | position
    return torch.where(known & (sample >> SAMPLE_TOKEN_BITS == own), sample % TOKENS, -1)


def note_ends(samples: Samples, batch: BatchView) -> None:
    """Notes, for each row, the request and position of the next sampled token."""
    prefix, new = batch.prefix_lens.long().clamp(min=0), batch.new_lens.long().clamp(min=0)
    # As `plan.rows` cuts rows whose tokens do not fit.
    new = torch.minimum(new, (batch.tokens - (new.cumsum(0) - new)).clamp(min=0))
    writer, end = batch.writers.long(), prefix + new
    known = (writer >= 0) & (new > 0) & (end < POSITIONS)
    sample = (writer.clamp(min=0) % WRITERS << SAMPLE_POSITION_BITS | end) << SAMPLE_TOKEN_BITS
    samples.ends[0] = batch.rows
    samples.ends[1 : 1 + batch.rows] = torch.where(known, sample, 0)


def _kept(writer: Tensor, position: Tensor) -> Tensor:
    """Where a token is kept."""
    return writer % SAMPLE_WRITERS * SAMPLE_TOKENS + position % SAMPLE_TOKENS
