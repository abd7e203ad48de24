"""check: before a forward, every slot to read must hold the expected position, token and prefix."""

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops import hashing
from canary_core.ops.mapping import KINDS, Seen, see, verdict
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan, samples
from canary_core.ops.torch.readers import shared_slots
from canary_core.ops.torch.ring import report
from canary_core.records import (
    CHAINS,
    CHECK_TILE,
    READ_TILE,
    SCRUB_WORDS,
    Clock,
    Counter,
    Cursor,
    Kind,
    Phase,
    Row,
    State,
    Status,
)


def check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """Reports mapping findings of all readable places; plans and claims the slots to be written; notes each row's head
    (the prefix hash before the new tokens) and, where tokens are compared with the sampler's, its tail; takes over the
    tokens sampled for the last forward; advances clock and cursors.

    At most one finding a place, the first that holds of: SLOT_RANGE, NULL_SLOT, UNWRITTEN, FREED, POSITION, TOKEN,
    PREFIX. A prefix hash of 0 is unknown and never judged. Slots that a kernel looks at once for several rows are
    counted, and judged row by row all the same.
    """
    shared = state.shared
    rows = plan.rows(state.region, batch, table)
    places = plan.expand(rows.read_first, rows.prefix)
    seen = see(state, *plan.lookup(state.region, table, places))
    expected = expected_tokens(batch, rows, places)
    linked, link_hash = _links(batch, rows, places, seen)
    ended, chain_hash = _ends(state, batch, rows, places, seen)
    found = verdict(seen, places.position, expected, linked & ended)
    chosen_places = _chosen(state, rows, places)
    step = shared.clock[Clock.STEP] + 1
    writer = batch.writers[places.row].long()
    for kind in KINDS:
        mask = (found == kind) & chosen_places
        if not bool(mask.any()):
            continue
        prefix = kind is Kind.PREFIX
        fields = {
            Row.POSITION: places.position,
            Row.TOKEN: expected,
            Row.FOUND_VALUE: torch.where(linked, chain_hash, link_hash) if prefix else torch.full_like(expected, -1),
            Row.WRITER: writer,
            **seen.fields(),
        }
        chosen = {word: value[mask] for word, value in fields.items()}
        about: dict[Row, Tensor | int] = {Row.REGION: state.index, Row.STEP: step * 8 + Phase.PRE_FORWARD}
        report(shared, kind, seen.slot[mask], {**chosen, **about})

    _note_heads(state, batch, rows, table)
    if state.samples is not None:
        samples.remember(state.samples)
        samples.note_tails(state.samples, state, batch, rows, table)
    _claim(state, plan.plan_writes(state, batch, table))
    shared.counters[Counter.CHECKED_SLOTS] += chosen_places.sum()
    shared.counters[Counter.SHARED_SLOTS] += shared_slots(state, batch, table, rows, CHECK_TILE)
    shared.counters[Counter.UNKNOWN_SLOTS] += (chosen_places & seen.usable & (seen.state == State.UNKNOWN)).sum()
    shared.counters[Counter.CHECKED_FORWARDS] += 1
    shared.clock[Clock.NEXT] = step
    _advance(state, rows)


def _chosen(state: RegionState, rows: plan.Rows, places: plan.Places) -> Tensor:
    """Whether each place is in the next ``CHECK_TILES`` tiles of the batch; moves the cursor."""
    count = rows.prefix - rows.read_first
    tiles = (count + CHECK_TILE - 1) // CHECK_TILE
    total = tiles.sum().clamp(min=1)
    tile = (tiles.cumsum(0) - tiles)[places.row] + (places.position - rows.read_first[places.row]) // CHECK_TILE
    budget = torch.minimum(state.cursors[Cursor.CHECK_TILES], total)
    first = state.cursors[Cursor.CHECK]
    state.cursors[Cursor.CHECK_NEXT] = (first + budget) % total
    return (tile - first) % total < budget


def expected_tokens(batch: BatchView, rows: plan.Rows, places: plan.Places) -> Tensor:
    """The request's own token at each place, -1 where the batch doesn't say."""
    table = batch.expected_tokens
    if table is None or table.numel() == 0:
        return torch.full_like(places.position, -1)
    position = plan.last_token(places.position, rows.group)
    inside = position < table.shape[1]
    token = table[places.row, torch.where(inside, position, 0)].long()
    return torch.where(inside, token, -1)


def anchors(batch: BatchView, row: Tensor) -> Tensor:
    """``h[-1]`` of each row in ``row``."""
    return torch.full_like(row, hashing.COMMON_ANCHOR) if batch.anchors is None else batch.anchors[row]


def _links(batch: BatchView, rows: plan.Rows, places: plan.Places, seen: Seen) -> tuple[Tensor, Tensor]:
    """Whether each place's hash continues the one before in the row (or the anchor), and the hash that would."""
    holds = seen.holds(places.position)
    before, known = torch.zeros_like(seen.hash), torch.zeros_like(holds)
    before[1:] = seen.hash[:-1]
    known[1:] = holds[:-1] & (before[1:] != 0)
    known &= places.position > rows.read_first[places.row]
    begin = places.position == 0
    before = torch.where(begin, anchors(batch, places.row), before)
    return seen.continues(places.position, before, known | begin)


def _chain(state: RegionState, batch: BatchView, row: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the row's request is known to have ended at ``length``, and the hash there."""
    writer = batch.writers[row].long()
    entry = state.chains[writer.clamp(min=0) % CHAINS]
    known = (writer >= 0) & (length > 0) & (entry[:, 0] == (writer << 32 | length)) & (entry[:, 1] != 0)
    return known, entry[:, 1]


def _ends(
    state: RegionState, batch: BatchView, rows: plan.Rows, places: plan.Places, seen: Seen
) -> tuple[Tensor, Tensor]:
    """Whether each row's last place has the final hash of its request's sequence; other places pass."""
    prefix = rows.prefix[places.row]
    known, hash = _chain(state, batch, places.row, prefix)
    judged = (places.position == prefix - 1) & known & (seen.hash != 0)
    return ~judged | (seen.hash == hash), hash


def _note_heads(state: RegionState, batch: BatchView, rows: plan.Rows, table: SlotTable) -> None:
    row = torch.arange(len(rows.prefix), device=rows.prefix.device)
    last = plan.Places(row, (rows.prefix - 1).clamp(min=0))
    seen = see(state, *plan.lookup(state.region, table, last))
    known, chain_hash = _chain(state, batch, row, rows.prefix)
    head = torch.where(seen.holds(last.position), seen.hash, torch.where(known, chain_hash, 0))
    state.scratch.heads[: len(row)] = torch.where(rows.prefix == 0, anchors(batch, row), head)


def _claim(state: RegionState, writes: plan.Writes) -> None:
    usable = writes.status == Status.OK
    claim = state.scratch.claim(state.shared.clock[Clock.STEP] + 1, writes.token)
    state.scratch.claims.scatter_reduce_(0, writes.slot[usable], claim[usable], "amax")


def _advance(state: RegionState, rows: plan.Rows) -> None:
    cursors = state.cursors
    cursors[Cursor.SCRUB :][:SCRUB_WORDS] = cursors[Cursor.SCRUB_NEXT :][:SCRUB_WORDS]
    tiles = ((rows.prefix - rows.read_first + READ_TILE - 1) // READ_TILE).sum()
    budget = torch.minimum(cursors[Cursor.READ_TILES], tiles)
    cursors[Cursor.READ] = (cursors[Cursor.READ] + budget) % tiles.clamp(min=1)
