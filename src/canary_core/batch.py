"""Inputs and outputs of one forward: `BatchView`, with one `SlotTable` per region."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from canary_core.errors import AttachError
from canary_core.region import Region, are_lists, require_index_tensor, require_tensor

MOST_EXPECTED = 1 << 22
"""Most entries of `BatchView.expected_tokens` given by adapters; positions beyond them are not compared."""

EXPECTED_STEP = 16
"""Adapters round the width of `BatchView.expected_tokens` up to a multiple, so that fewer kernels are compiled."""

MOST_ROWS = 65536
"""Most requests of one forward: kernels work out each program's share from all lengths at once."""

LISTS = ("prefix_lens", "new_lens", "token_ids", "writers", "positions", "anchors")
"""One-dimensional tensors of a view."""


@dataclass(frozen=True, slots=True, eq=False)
class StateCheckpoints:
    """Checkpoint slots of recurrent states, beside the slots of a table: a forward copies a row's state there as of one
    new token, for other requests to start from.

    slots, positions: int64 ``[batch rows]``: the slot, -1 for none, and the position of the token.
    copied: for a row's last token the slot is a bitwise copy of the row's own state after the forward, and the two are
    compared.

    Raises `AttachError` for wrong dtypes or different shapes.
    """

    slots: Tensor
    positions: Tensor
    copied: bool = False

    def __post_init__(self) -> None:
        require_tensor("checkpoints: slots", self.slots)
        device = self.slots.device
        for name in ("slots", "positions"):
            require_index_tensor(f"checkpoints: {name}", getattr(self, name), device, dims=1)
        if self.slots.dtype != torch.int64 or self.positions.dtype != torch.int64:
            raise AttachError(
                f"checkpoints: slots and positions must be int64, got {self.slots.dtype} and {self.positions.dtype}"
            )
        if self.slots.shape != self.positions.shape:
            raise AttachError(
                f"checkpoints: one position for each slot, got {self.positions.shape[0]} for {self.slots.shape[0]}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """The device table read by attention, as slots of one region.

    The entry of position ``p`` of batch row ``r`` is the element ``rows[r] * entries.stride(0) + q // page_size`` of
    ``entries``, with ``q = p % ring_slots`` if ``ring_slots`` else ``p``; its slot is ``entry * page_size + q %
    page_size``. A slot table has ``page_size`` 1, a block table the page size, a ragged list of slots the stride 1 with
    ``rows`` its starts. Negative entries are padding.

    entries: int32 or int64 ``[table rows, width]``. rows: int32 or int64 ``[batch rows]``, None for row ``r`` = ``r``;
    with a ragged list a start may be negative as long as no negative element is read.
    write_slots: int32 or int64 ``[tokens or more]``, the engine's own list of where each of ``token_ids`` is stored;
    None derives the slots from the table. Where the table has an entry for such a position before the forward, the two
    are compared.
    stored_tokens: a forward stores at most the last ``stored_tokens`` new tokens of a row (a ring); 0: all of them.
    pool_page: ``(rows, slots)`` where entries and write slots number a pool's rows, and only the first ``slots`` of
    each page of ``rows`` rows belong to this region (pages of several layers in one tensor): row ``n`` is slot ``n //
    rows * slots + n % rows``, and a row with ``n % rows >= slots`` is out of range. None: entries are slots.
    checkpoints: slots into which the forward also copies states, None for none; only in regions of one token a slot.
    carried: the bytes of the new tokens came by copies (`SlotEvents.copy`), not by the forward: the record takes the
    tokens, and keeps the fingerprints brought by the copies.
    """

    entries: Tensor
    rows: Tensor | None = None
    page_size: int = 1
    ring_slots: int = 0
    write_slots: Tensor | None = None
    stored_tokens: int = 0
    pool_page: tuple[int, int] | None = None
    checkpoints: StateCheckpoints | None = None
    carried: bool = False

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.ring_slots < 0 or self.stored_tokens < 0:
            raise AttachError(
                f"slot table: page_size must be at least 1, ring_slots and stored_tokens not negative, got "
                f"page_size={self.page_size}, ring_slots={self.ring_slots}, stored_tokens={self.stored_tokens}"
            )
        if self.stored_tokens == 0 and self.ring_slots:
            object.__setattr__(self, "stored_tokens", self.ring_slots)
        if self.pool_page is not None and not 1 <= self.pool_page[1] <= self.pool_page[0]:
            raise AttachError(
                f"slot table: pool_page must be (rows, slots) with 1 <= slots <= rows, got {self.pool_page}"
            )
        require_tensor("slot table: entries", self.entries)
        device = self.entries.device
        require_index_tensor("slot table: entries", self.entries, device, dims=2)
        if not are_lists((self.rows, self.write_slots), device):
            for name, tensor in (("rows", self.rows), ("write_slots", self.write_slots)):
                if tensor is not None:
                    require_index_tensor(f"slot table: {name}", tensor, device, dims=1)

    @property
    def bounds(self) -> tuple[int, int, int]:
        """`width`, the elements from one row to the next, and `extent`: together, since kernels need all three every
        forward."""
        count, width = self.entries.shape
        stride = self.entries.stride(0)
        extent = (count - 1) * stride + width if count and width else 0
        ragged = count == 1 and stride == 1 and self.rows is not None
        return 1 << 62 if ragged else width, stride, extent

    @property
    def width(self) -> int:
        """Entries of one row. A ragged list has no width: starts may be negative, so a row's first listed position may
        lie beyond the list's own length; only `extent` bounds the reads there."""
        return self.bounds[0]

    @property
    def extent(self) -> int:
        """Number of elements of ``entries`` within reach: from the first of the first row to the last of the last."""
        return self.bounds[2]

    @property
    def elements(self) -> Tensor:
        """``entries`` as one list, ``[extent]``, in the same memory."""
        return self.entries.as_strided((self.extent,), (1,))

    def stored_by(self, region: Region) -> int:
        """Most new tokens of a row stored in ``region``, counted from the last, beside those at the end of a page of a
        ``page_ring``; 0: all of them."""
        return self.stored_tokens or (region.page_ring[1] if region.page_ring else 0)


@dataclass(frozen=True, slots=True, eq=False)
class BatchView:
    """One forward: each row is a request with ``prefix_lens[r]`` tokens in the cache and ``new_lens[r]`` to write.

    All tensors are on the pool's device and may be static buffers larger than the batch; rows with no prefix and no new
    tokens are padding. Row ``r``'s new tokens follow row ``r - 1``'s in ``token_ids``.

    prefix_lens, new_lens, writers: int32 or int64 ``[rows]``; a writer id is the small number of a request (`Writers`
    makes them), -1 for unknown.
    token_ids: int32 or int64 ``[tokens]``. positions: same shape, the engine's own positions, None for not checked.
    tables: region name → `SlotTable`; the forward leaves regions without a table alone.
    expected_tokens: int32 or int64 ``[rows, width]``, the requests' own tokens by position, -1 where unknown.
    anchors: int64 ``[rows]``, start of each row's prefix hash (`hashing.anchor`), None for the common one; 0 where a
    row's prefix can't be judged: hashes computed from 0 are unknown.

    Raises `AttachError` if dtypes, shapes or devices do not fit.
    """

    prefix_lens: Tensor
    new_lens: Tensor
    token_ids: Tensor
    writers: Tensor
    tables: Mapping[str, SlotTable]
    positions: Tensor | None = None
    expected_tokens: Tensor | None = None
    anchors: Tensor | None = None
    device: torch.device = field(init=False, repr=False)
    """Where all tensors of the batch are."""
    rows: int = field(init=False, repr=False)
    """Batch rows, padding included."""
    tokens: int = field(init=False, repr=False)
    """Capacity of ``token_ids``: at least the sum of ``new_lens``."""

    def __post_init__(self) -> None:
        prefix, new, writers, anchors = self.prefix_lens, self.new_lens, self.writers, self.anchors
        require_tensor("batch: prefix_lens", prefix)
        device = prefix.device
        lists = (prefix, new, self.token_ids, writers, self.positions, anchors)
        # Each forward has a view, so what fits is seen at once, and only what doesn't is looked at tensor by tensor.
        if not are_lists(lists, device):
            for what, tensor in zip(LISTS, lists, strict=True):
                if tensor is not None:
                    require_index_tensor(f"batch: {what}", tensor, device, dims=1)
        rows = prefix.shape[0]
        # Asked many times a forward; torch makes new objects each time.
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "tokens", self.token_ids.shape[0])
        if self.expected_tokens is not None:
            require_index_tensor("batch: expected_tokens", self.expected_tokens, device, dims=2)
        if new.shape[0] != rows or writers.shape[0] != rows or (anchors is not None and anchors.shape[0] != rows):
            for name, tensor in (("new_lens", new), ("writers", writers), ("anchors", anchors)):
                if tensor is not None and tensor.shape[0] != rows:
                    raise AttachError(f"batch: {name} has shape {tuple(tensor.shape)}, rows are {rows}")
        if anchors is not None and anchors.dtype != torch.int64:
            raise AttachError(f"batch: anchors must be int64, got {anchors.dtype}")
        # The second one takes ten times as long to see.
        if not isinstance(self.tables, (dict, Mapping)):
            raise AttachError(
                f"batch: tables must map names of regions to SlotTables, got a {type(self.tables).__name__}; make it a "
                "dict in the adapter"
            )
        for name, table in self.tables.items():
            self._require_table(name, table)
            if table.checkpoints is not None and table.checkpoints.slots.shape != self.prefix_lens.shape:
                given = tuple(table.checkpoints.slots.shape)
                raise AttachError(f"batch: region {name!r} has checkpoints for {given} rows, rows are {self.rows}")
            if table.entries.device != device:
                raise AttachError(f"batch: the table of region {name!r} is on {table.entries.device}, rows on {device}")

    def _require_table(self, name: str, table: SlotTable) -> None:
        """Raises `AttachError` unless ``table`` is one, with a row for each row and a write slot for each token."""
        if not isinstance(table, SlotTable):
            raise AttachError(
                f"batch: the table of region {name!r} must be a SlotTable, got a {type(table).__name__}; make it one "
                "in the adapter"
            )
        if table.rows is not None and table.rows.shape[0] < self.rows:
            raise AttachError(
                f"batch: the table of region {name!r} has {table.rows.shape[0]} rows, the batch {self.rows}; give one "
                "for each request"
            )
        if table.write_slots is not None and table.write_slots.shape[0] < self.tokens:
            raise AttachError(
                f"batch: region {name!r} has {table.write_slots.shape[0]} write_slots for {self.tokens} token_ids; "
                "give one for each token, or None to derive them from the table"
            )


Batches = Callable[[int], Iterable[BatchView]]
"""Views of padding alone, by the number of rows."""


def view_or_none(view: BatchView | None) -> BatchView | None:
    """``view``. Raises `AttachError` for anything but a view or None."""
    if view is None or isinstance(view, BatchView):
        return view
    raise AttachError(
        f"a forward's view must be a BatchView, got a {type(view).__name__}; correct the adapter that makes it, or "
        "give None for a forward that can't be checked"
    )


def require_place(view: BatchView, device: torch.device, regions: Set[str]) -> None:
    """Raises `AttachError` unless ``view`` is a `BatchView` with at most `MOST_ROWS` rows, on the pool's ``device`` (a
    kernel would read foreign addresses), with tables of ``regions`` only."""
    if not isinstance(view, BatchView) and view_or_none(view) is None:
        raise AttachError("step.before needs the BatchView of its forward, got None; leave both halves out there")
    if view.device != device:
        raise AttachError(f"the batch is on {view.device}, the pool on {device}; build the BatchView there")
    if view.rows > MOST_ROWS:
        raise AttachError(f"a batch may have {MOST_ROWS} rows, got {view.rows}; split it")
    if not view.tables.keys() <= regions:
        unknown = sorted(view.tables.keys() - regions)
        raise AttachError(f"the batch has tables of unknown regions {unknown}; there are {sorted(regions)}")


def tokens_cut(view: BatchView) -> bool:
    """Whether the requests' own tokens are given for the first positions only, since all would be more than
    `MOST_EXPECTED`. Looks at shapes only."""
    table = view.expected_tokens
    return table is not None and table.shape[0] * (table.shape[1] + EXPECTED_STEP) > MOST_EXPECTED
