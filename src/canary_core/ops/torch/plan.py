"""plan: which (row, position) pairs a forward reads and writes, and through which slots.

Reads are worked out where they are needed; writes, which three ops need, are planned once, in `Scratch.plan`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.state import RegionState
from canary_core.records import PLAN_RECORD, Status
from canary_core.region import Region


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One entry per batch row, int64 ``[rows]``. The forward reads positions ``[read_first, prefix)`` and computes
    ``[prefix, prefix + new)``, stored from ``stored_first`` on. token_zero: the index into ``token_ids`` of a token at
    position 0, extrapolated. Positions count slots: where a slot holds ``group`` tokens, the token of a position is the
    last of the group."""

    prefix: Tensor
    new: Tensor
    read_first: Tensor
    stored_first: Tensor
    token_zero: Tensor
    group: int

    def token(self, places: "Places") -> Tensor:
        """Index into ``token_ids`` of each place among the new ones."""
        return self.token_zero[places.row] + last_token(places.position, self.group)

    @property
    def new_first(self) -> Tensor:
        """How many new positions the rows before have."""
        return self.new.cumsum(0) - self.new


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """One entry per (row, position) pair, int64 ``[n]``: rows in order, positions ascending."""

    row: Tensor
    position: Tensor

    def __len__(self) -> int:
        return self.row.shape[0]


def rows(region: Region, batch: BatchView, table: SlotTable) -> Rows:
    """The ranges of all rows. Negative lengths count as 0."""
    prefix = batch.prefix_lens.long().clamp(min=0)
    new = batch.new_lens.long().clamp(min=0)
    token_first = new.cumsum(0) - new
    asked = new
    # Rows whose tokens do not fit into token_ids are cut, never read past its end.
    new = torch.minimum(new, (batch.tokens - token_first).clamp(min=0))
    token_zero = token_first - prefix
    group = region.tokens_per_slot
    new = (prefix + new) // group - prefix // group
    prefix = prefix // group
    read_first = _read_first(region, prefix, asked)
    stored_first = prefix
    most = table.stored_by(region)
    if most:
        stored_first = prefix + (new - most).clamp(min=0)
    return Rows(prefix, new, read_first, stored_first, token_zero, group)


def _read_first(region: Region, prefix: Tensor, new: Tensor) -> Tensor:
    """First position read by each row; the prefix length for a row without reads."""
    if not region.group_tokens:
        return region.passed(prefix)
    back = region.attention_window - 1
    first = (prefix - prefix % region.group_tokens - back).clamp(min=0)
    completes = (prefix + new) // region.group_tokens > prefix // region.group_tokens
    return torch.where(completes, first, prefix)


def stored(region: Region, ranges: Rows) -> Places:
    """The new positions to store: the last one of each slot of a ring."""
    if region.page_ring is None:
        return expand(ranges.stored_first, ranges.prefix + ranges.new)
    page, ring = region.page_ring
    places = expand(ranges.prefix, ranges.prefix + ranges.new)
    keep = (places.position >= ranges.stored_first[places.row]) | (places.position % page >= page - ring)
    return Places(places.row[keep], places.position[keep])


def last_token(position: Tensor, group: int) -> Tensor:
    """Position of the last token of the slot at ``position``."""
    return (position + 1) * group - 1


def expand(first: Tensor, end: Tensor) -> Places:
    """All positions ``[first[r], end[r])`` of all rows."""
    count = end - first
    row = torch.repeat_interleave(torch.arange(len(first), device=first.device), count)
    offset = torch.arange(len(row), device=first.device) - (count.cumsum(0) - count)[row]
    return Places(row, first[row] + offset)


def elements(table: SlotTable, places: Places, group: int) -> Tensor:
    """Index of each place's entry in `SlotTable.elements`, possibly out of bounds. ``group``: see `Rows`."""
    first = places.row if table.rows is None else table.rows[places.row].long()
    return first * table.entries.stride(0) + _column(table, places, group) // table.page_size


def lookup(region: Region, table: SlotTable, places: Places) -> tuple[Tensor, Tensor]:
    """Slot and status of each place, as found by attention. Where the status isn't OK, the slot is the number found: -1
    if the table has no entry."""
    number, present = numbers(table, places, region.tokens_per_slot)
    slot, status = region.resolve(number, table.pool_page)
    return torch.where(present, slot, -1), torch.where(present, status, Status.RANGE)


def numbers(table: SlotTable, places: Places, group: int = 1) -> tuple[Tensor, Tensor]:
    """Each place's slot number in the table, int64 ``[n]``, and whether there is an entry: bool ``[n]``. ``group``: see
    `Rows`."""
    extent = table.extent
    column, element = _column(table, places, group), elements(table, places, group)
    present = (column // table.page_size < table.width) & (element >= 0) & (element < extent)
    flat = table.elements if extent else table.entries.new_zeros(1)
    entry = flat[torch.where(present, element, 0)].long()
    return torch.where(entry >= 0, entry * table.page_size + column % table.page_size, entry), present


def _column(table: SlotTable, places: Places, group: int) -> Tensor:
    """Column of each place in the table."""
    column = last_token(places.position, group)
    return column % table.ring_slots if table.ring_slots else column


@dataclass(frozen=True, slots=True, eq=False)
class Writes:
    """The stored new tokens of a forward, int64 ``[n]``: index into ``token_ids``, row, position, slot, `Status`, the
    table's slot, and the slot's record before, int32 ``[n, RECORD_WORDS]`` (see `records.PLAN_WORDS`)."""

    token: Tensor
    row: Tensor
    position: Tensor
    slot: Tensor
    status: Tensor
    table_slot: Tensor
    record: Tensor

    def __getitem__(self, mask: Tensor) -> "Writes":
        return Writes(*(getattr(self, field)[mask] for field in self.__slots__))


def plan_writes(state: RegionState, batch: BatchView, table: SlotTable) -> Writes:
    """Fills the plan of ``state`` for a forward, and returns the content."""
    plan, region = state.scratch.plan, state.region
    ranges = rows(region, batch, table)
    places = stored(region, ranges)
    token = ranges.token(places)
    slot, status = write_slots(region, table, places, token)
    plan[: batch.tokens] = 0
    table_slot = torch.full_like(slot, -1)
    if table.write_slots is not None:
        found, usable = lookup(region, table, places)
        table_slot = torch.where(usable == Status.OK, found, -1)
    usable = status == Status.OK
    record = torch.where(usable[:, None], state.records[torch.where(usable, slot, 0)], 0)
    words = torch.stack(((status + 1) << 32 | places.row, slot, places.position, table_slot), dim=1)
    plan[token] = torch.cat((words, record.view(torch.int64)), dim=1)
    return Writes(token, places.row, places.position, slot, status, table_slot, record)


def planned_writes(plan: Tensor, batch: BatchView) -> Writes:
    """The writes planned by `plan_writes`."""
    token = plan[: batch.tokens, 0].nonzero()[:, 0]
    word, slot, position, table_slot = plan[token, :PLAN_RECORD].unbind(1)
    record = plan[token, PLAN_RECORD:].view(torch.int32)
    return Writes(token, word & 0xFFFFFFFF, position, slot, (word >> 32) - 1, table_slot, record)


def write_slots(region: Region, table: SlotTable, places: Places, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Slot and status of each place to store: from the engine's own list if there is one, else from the table."""
    if table.write_slots is None:
        return lookup(region, table, places)
    listed = tokens < len(table.write_slots)
    if table.write_slots.numel() == 0:
        return torch.full_like(tokens, -1), torch.full_like(tokens, Status.RANGE)
    slot, status = region.resolve(table.write_slots[torch.where(listed, tokens, 0)], table.pool_page)
    return torch.where(listed, slot, -1), torch.where(listed, status, Status.RANGE)
