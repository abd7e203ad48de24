"""read_check: the bytes of slots that a batch reads, against the recorded fingerprints."""

import torch

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.mapping import see
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan
from canary_core.ops.torch.compare import compare
from canary_core.records import READ_TILE, Cursor, Phase, Row


def read_check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """Before a forward and after `check`: compares the bytes of the readable slots in the next ``READ_TILES`` tiles of
    `READ_TILE` places, going round the batch. Reports BYTES. A slot whose bytes equal their fingerprint counts as
    compared, whatever its record says: only after a difference does a kernel ask whether the slot was written."""
    rows = plan.rows(state.region, batch, table)
    places = plan.expand(rows.read_first, rows.prefix)
    count = rows.prefix - rows.read_first
    tiles = (count + READ_TILE - 1) // READ_TILE
    total = tiles.sum()
    tile = (tiles.cumsum(0) - tiles)[places.row] + (places.position - rows.read_first[places.row]) // READ_TILE
    # `check` has already moved the cursor past this forward's stretch.
    budget = torch.minimum(state.cursors[Cursor.READ_TILES], total)
    first = state.cursors[Cursor.READ] - budget
    chosen = (tile - first) % total.clamp(min=1) < budget
    places = plan.Places(places.row[chosen], places.position[chosen])
    seen = see(state, *plan.lookup(state.region, table, places))
    about = {Row.POSITION: places.position, Row.WRITER: batch.writers[places.row].long()}
    compare(state, seen, Phase.PRE_FORWARD, about)
