"""`BlockLists`: an engine's own blocks of its requests, against the tables given to attention."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from canary_adapters.tables import block_table, ragged_table, ring_table
from canary_core import BatchView, Canary, ReadLens, ReadTable, SlotTable
from canary_core.ops.upload import number_array, upload

MOST_BLOCKS = 1 << 14
"""Blocks uploaded for one comparison; remaining rows have their turn later."""
NOT_NOW = 1 << 30
"""A row beyond every table, so that nothing of it is compared."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenLens:
    """Lengths given to attention for the rows of a `GivenBlocks`.

    name, given, begins: as in `ReadLens`. of: tokens before the forward (``prefix``), of the forward (``new``), or both
    (``read``), of which ``common`` first ones are left out. Rows without a length are not compared.
    """

    name: str
    given: Tensor
    of: Literal["prefix", "new", "read"]
    begins: bool = False
    common: int = 0

    def beside(self, prefix: Tensor, new: Tensor) -> ReadLens | None:
        """With the lengths of the rows of a view; None where there are fewer."""
        if self.given.shape[0] < len(prefix) + self.begins or self.given.device != prefix.device:
            return None
        expected = {"prefix": prefix, "new": new}.get(self.of)
        return ReadLens(
            self.name, self.given, prefix + new - self.common if expected is None else expected, self.begins
        )


@dataclass(frozen=True, slots=True, eq=False)
class GivenBlocks:
    """A table given to attention for the rows of a batch from ``first_row`` on.

    name, region: as in `ReadTable`; group: the region's number in the engine. entries: int32 or int64, a block table
    ``[rows, width]`` with ``page_slots`` slots an entry, or the slots ``[tokens]`` of the batch's new tokens, in order;
    None where only lengths can be compared. block_slots: slots of a block in the engine's own lists. lens: at most two.
    common: as in `ReadTable`.
    """

    name: str
    region: str
    group: int
    entries: Tensor | None
    page_slots: int
    block_slots: int
    first_row: int = 0
    lens: tuple[GivenLens, ...] = ()
    common: int = 0


Lists = Callable[[GivenBlocks], Sequence[Sequence[int] | None]]
"""The blocks of each row of a batch in the region of a table, by position; None for a row with unknown blocks."""


class RequestBlocks:
    """The blocks of each request in each group of an engine, by position, as reported by the scheduler."""

    def __init__(self) -> None:
        self._lists: dict[str, list[array[int]]] = {}

    def give(self, request: str, blocks: Sequence[Sequence[int]]) -> None:
        """Sets all blocks of ``request``, by group."""
        self._lists[request] = [number_array(group, "i") for group in blocks]

    def extend(self, request: str, blocks: Sequence[Sequence[int]]) -> None:
        """Adds blocks to a request; a request unknown so far stays unknown."""
        for known, more in zip(self._lists.get(request, ()), blocks, strict=False):
            known.extend(more)

    def drop(self, request: str) -> None:
        """The request has ended."""
        self._lists.pop(request, None)

    def names(self) -> list[str]:
        """The requests with blocks. For any thread."""
        return list(self._lists)

    def of(self, requests: Sequence[str], group: int) -> list[Sequence[int] | None]:
        """The requests' blocks in a group, None for an unknown request. Not to be written to."""
        return [self._lists[request][group] if request in self._lists else None for request in requests]


class BlockLists:
    """Compares what attention was given with lists of blocks, for the Canary of a pool. Copies at most `MOST_BLOCKS`
    numbers to the device for a comparison: tables and rows take turns."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self._turn = 0
        self._row = 0

    def compare(self, view: BatchView, given: Sequence[GivenBlocks], lists: Lists) -> None:
        """Compares tables of the forward of ``view``, where `TableCheck.due`: once its tables are made, on its stream,
        before `Step` checks it. Never captured."""
        tables = self._canary.step.tables
        for _ in range(len(given)):
            one = given[self._turn % len(given)]
            self._turn += 1
            if one.entries is None:
                # All but the lengths is left out.
                rows = slice(one.first_row, view.rows)
                lens = self._lens(one, view.prefix_lens[rows], view.new_lens[rows])
                if lens:
                    tables.compare([ReadTable.of_lens(one.region, view.tables[one.region], view.writers[rows], *lens)])
                    return
                continue
            kept = self.kept(lists(one)[one.first_row :], one.block_slots)
            if kept is not None:
                tables.compare([self._table(view, one, one.entries, kept)])
                return
        tables.skip()

    def _table(self, view: BatchView, one: GivenBlocks, entries: Tensor, kept: SlotTable) -> ReadTable:
        rows = slice(one.first_row, view.rows)
        prefix, new = view.prefix_lens[rows], view.new_lens[rows]
        if entries.dim() == 1:
            starts = new.cumsum(0) - new - prefix
            given, first = ragged_table(entries, starts), prefix
        else:
            given = block_table(entries, one.page_slots)
            first = self._canary.regions[one.region].passed(prefix)
            if entries.shape[0] < len(prefix):
                cut = slice(entries.shape[0])
                prefix, new, first = prefix[cut], new[cut], first[cut]
        writers, lens = view.writers[rows][: len(prefix)], self._lens(one, prefix, new)
        end, common = prefix + new, one.common
        return ReadTable(one.name, one.region, given, kept, first, end, writers, common=common, lens=lens)

    def _lens(self, one: GivenBlocks, prefix: Tensor, new: Tensor) -> tuple[ReadLens, ...]:
        lens = tuple(found for given in one.lens if (found := given.beside(prefix, new)) is not None)
        if len(lens) < len(one.lens):
            self._canary.step.tables.leave_out(f"lengths of {one.name}", "they are not those of the batch's rows")
        return lens

    def kept(self, lists: Sequence[Sequence[int] | None], block_slots: int, ring_slots: int = 0) -> SlotTable | None:
        """The blocks of the rows in turn as `ReadTable.kept`, on the current stream: ``lists`` has each row's by
        position, None where unknown. ``ring_slots``: see `SlotTable`. None if no row has any."""
        # A row of a ring is as wide as the ring, also while no request has filled it.
        rows, width = len(lists), max(1, -(-ring_slots // block_slots))
        chosen: list[int] = []
        for number in range(rows):
            row = (self._row + number) % rows
            blocks = lists[row]
            if not blocks:
                continue
            wider = max(width, len(blocks))
            if chosen and (len(chosen) + 1) * wider > MOST_BLOCKS:
                break
            chosen.append(row)
            width = wider
        if not chosen:
            return None
        self._row = chosen[-1] + 1
        self._canary.step.tables.rows_left += sum(map(bool, lists)) - len(chosen)
        device = self._canary.device
        # Row by row in a list of Python's: as many small operations of torch take some 10 us each.
        numbers = array("i", [NOT_NOW]) * rows
        for place, row in enumerate(chosen):
            numbers[row] = place
            blocks = lists[row] or ()
            numbers.extend(blocks)
            numbers.extend(array("i", [-1]) * (width - len(blocks)))
        both = upload(torch.frombuffer(numbers, dtype=torch.int32), device)
        table = block_table(both[rows:].view(len(chosen), width), block_slots, both[:rows])
        return ring_table(table, ring_slots) if ring_slots else table


def metadata_blocks(
    metadata: Mapping[str, Any],
    layers: Sequence[str],
    stores: Any,
    make: Callable[..., GivenBlocks],
    left_out: Callable[[str, str], None],
) -> Iterator[GivenBlocks]:
    """Tables and lengths in attention metadata like vLLM's for some ``layers``: each a ``block_table``, or one for the
    decoding rows and one for the rows after; and the slots of new tokens, by layer in ``stores`` or as
    ``slot_mapping``.

    ``metadata``: by layer; several may share one. ``make``: a `GivenBlocks` without ``name``, ``entries`` and, if not
    the usual ones, ``first_row``, ``lens`` and ``common``.
    ``left_out`` gets the class of metadata without a table, or without lengths, and the reason.
    """
    seen: set[int] = set()
    for layer in layers:
        one = metadata.get(layer)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        kind, found, why = type(one).__name__, False, _why_no_lens(one)
        whole = () if why else _lens(one, kind)
        later, parts = int(getattr(one, "num_decodes", 0) or 0), []
        if hasattr(one, "make_virtual_batches_block_table"):
            left_out(kind, "its rows are pieces of requests")
        else:
            parts = [
                (one, 0, ""),
                (getattr(one, "decode", None), 0, "decode "),
                (getattr(one, "prefill", None), later, ""),
            ]
        for part, first, which in parts:
            table = getattr(part, "block_table", getattr(part, "block_tables", None))
            if isinstance(table, Tensor) and table.dim() == 2:
                found = True
                lens = whole if part is one or why else _lens(part, f"{which}{kind}")
                if not why and all(given.of == "new" for given in lens):
                    left_out(f"lengths of {type(part).__name__}", "how much it reads is not known here")
                common = int(one.common_prefix_len) if getattr(one, "use_cascade", False) else 0
                name = f"block_table of {kind}"
                yield make(name=name, entries=table, first_row=first, lens=lens, common=common)
        if parts and not found:
            left_out(kind, "it has no block table")
        if why or not (found or whole):
            left_out(f"lengths of {kind}", why or "it has none that are known here")
        slots = stores.get(layer) if isinstance(stores, Mapping) else getattr(one, "slot_mapping", None)
        if isinstance(slots, Tensor) and slots.dim() == 1:
            yield make(name=f"slot_mapping of {kind}", entries=slots, lens=whole)


def _why_no_lens(metadata: Any) -> str | None:
    """Why lengths in such metadata can't be judged, None if they can."""
    if getattr(metadata, "causal", True) is False:
        return "attention that is not causal may read an encoder's tokens"
    if getattr(metadata, "logits_indices_padded", None) is not None:
        return "only the last tokens of each row are computed"
    if hasattr(metadata, "make_virtual_batches_block_table"):
        return "its rows are pieces of requests"
    return None


def _lens(part: Any, kind: str) -> tuple[GivenLens, ...]:
    """Lengths in metadata, or in a part of it, by what it reads: of a cascade those behind the common prefix."""
    found: list[GivenLens] = []
    cascade = bool(getattr(part, "use_cascade", False))
    reads = "suffix_kv_lens" if cascade else "seq_lens"
    given = getattr(part, reads, None)
    if isinstance(given, Tensor) and given.dim() == 1:
        common = int(part.common_prefix_len) if cascade else 0
        found.append(GivenLens(f"{reads} of {kind}", given, "read", common=common))
    elif hasattr(part, "chunked_context"):
        # Where no row of a prefill has a context, there is none.
        context = part.chunked_context
        given = torch.zeros_like(part.query_start_loc) if context is None else getattr(context, "context_lens", None)
        if isinstance(given, Tensor) and given.dim() == 1:
            found.append(GivenLens(f"context_lens of {kind}", given, "prefix"))
    starts = getattr(part, "query_start_loc", getattr(part, "cum_seq_lens_q", None))
    if isinstance(starts, Tensor) and starts.dim() == 1:
        name = "query_start_loc" if hasattr(part, "query_start_loc") else "cum_seq_lens_q"
        found.append(GivenLens(f"{name} of {kind}", starts, "new", begins=True))
    return tuple(found)


def moved_states(
    page: int, computed: Sequence[int], new: Sequence[int], blocks: Sequence[Sequence[int] | None]
) -> list[tuple[int, int]]:
    """For recurrent states kept block by block: source and target blocks of the engine's copies of states for this
    forward, which ends in another block than the one before. ``page``: tokens of a block. ``computed``, ``new``: tokens
    of each row before the forward and within. ``blocks``: those of each row, None if unknown."""
    moves = []
    for before, more, held in zip(computed, new, blocks, strict=True):
        first, last = (before - 1) // page, (before + more - 1) // page
        if before and first != last and held is not None and last < len(held):
            moves.append((int(held[first]), int(held[last])))
    return moves
