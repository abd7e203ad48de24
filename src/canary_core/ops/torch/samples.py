"""What the sampler gave: `check` takes it over, `record` compares with it what the next forward computed.

A token is compared where the forward computes it, and once more while it is among the last that are read: so it is seen
when a forward was fed another token, and when the slots of a request go on with a token that was never sampled."""

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


def remember(samples: Samples) -> None:
    """Takes over what was given for the last forward, and empties `Samples.given`. Of a position for which nothing was
    sampled what was known before is forgotten: the request goes on there with a token that nobody has told."""
    rows = int(samples.ends[0])
    end, given = samples.ends[1 : 1 + rows], samples.given[:, :rows]
    for back in range(SAMPLE_TOKENS):
        token = given[SAMPLE_TOKENS - 1 - back]
        position = (end >> SAMPLE_TOKEN_BITS) % POSITIONS - back
        sample = torch.where((token >= 0) & (token < TOKENS), end - (back << SAMPLE_TOKEN_BITS) + token, 0)
        said = (end != 0) & (position > 0) & (token != NOT_SAMPLED)
        samples.table[_kept(end >> (SAMPLE_TOKEN_BITS + SAMPLE_POSITION_BITS), position)[said]] = sample[said]
    given.fill_(NOT_SAMPLED)
    given[-1].fill_(NO_SAMPLE)


def note_tails(samples: Samples, state: RegionState, batch: BatchView, rows: plan.Rows, table: SlotTable) -> None:
    """Notes what the last slots hold that each row reads, while its table says which they are; see `TAIL_WORDS`."""
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
    """The token that the sampler gave ``writer`` for each ``position``, -1 where that is not known; int64 ``[n]``."""
    known = (writer >= 0) & (position > 0) & (position < POSITIONS)
    sample = samples.table[_kept(writer.clamp(min=0), torch.where(known, position, 0))]
    own = writer.clamp(min=0) % WRITERS << SAMPLE_POSITION_BITS | position
    return torch.where(known & (sample >> SAMPLE_TOKEN_BITS == own), sample % TOKENS, -1)


def note_ends(samples: Samples, batch: BatchView) -> None:
    """Notes for which position of which request the sampler gives a token next."""
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
