"""Tables and lengths given to attention for one forward: `ReadTable`, with `ReadLens`. Loaded with the first one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.batch import SlotTable
from canary_core.errors import AttachError
from canary_core.region import require_index_tensor, require_tensor

MOST_LENS = 2
"""Most `ReadLens` of one table: a kernel has so many parameters for them."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadLens:
    """Lengths given to an attention backend for the rows of one forward, beside those of the engine's requests.

    name: the name of the lengths in a finding, e.g. ``seq_lens of FlashAttentionMetadata``.
    given: int32 or int64, contiguous: a length for each row, or with ``begins`` where each row begins in a list and
    where the last one ends (an ``indptr``): one number more. Numbers of padded rows may follow.
    expected: int32 or int64 ``[rows]``, contiguous: the length that each row must have, negative where it can't be
    known: such a row is left out.

    Raises `AttachError` for wrong dtypes, shapes or devices.
    """

    name: str
    given: Tensor
    expected: Tensor
    begins: bool = False

    def __post_init__(self) -> None:
        for name in ("given", "expected"):
            require_tensor(f"{self.name}: {name}", getattr(self, name))
            require_index_tensor(f"{self.name}: {name}", getattr(self, name), self.given.device, dims=1)
        if self.given.shape[0] < self.expected.shape[0] + self.begins:
            raise AttachError(
                f"{self.name}: {self.given.shape[0]} numbers are given, for {self.expected.shape[0]} rows must be "
                f"{self.expected.shape[0] + self.begins}; give one for each row"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ReadTable:
    """The table given to an attention backend for one forward, beside the engine's own table: both must name the same
    slot at each position ``[first, end)`` of each row.

    name: the table's name in a finding, e.g. ``kv_indices of TritonAttnBackend``. region: the region of the slots, with
    one token a slot.
    given: the backend's table. kept: the engine's table, with slot numbers as in the region's own table; where it has
    no slot, or padding, nothing is compared.
    first, end, writers: int32 or int64 ``[rows]``, contiguous. A row with ``end`` not above ``first`` is left out.
    own_slots: ``given`` has the region's own slots, translated by the backend; False: ``given`` is numbered like
    ``kept``.
    common: the first so many positions of every row are read by the entries of row 0 (a cascade).
    lens: lengths that go with the table, at most `MOST_LENS`; compared in the same launch. Where a backend has lengths
    and no table: `of_lens`.

    Raises `AttachError` for wrong dtypes, shapes or devices.
    """

    name: str
    region: str
    given: SlotTable
    kept: SlotTable
    first: Tensor
    end: Tensor
    writers: Tensor
    own_slots: bool = False
    common: int = 0
    lens: tuple[ReadLens, ...] = ()

    def __post_init__(self) -> None:
        device = self.writers.device
        for name in ("first", "end", "writers"):
            require_index_tensor(f"{self.name}: {name}", getattr(self, name), device, dims=1)
        for name, table in (("given", self.given), ("kept", self.kept)):
            have = self.rows if table.rows is None else table.rows.shape[0]
            if table.entries.device != device or have < self.rows:
                raise AttachError(
                    f"{self.name}: {name} has {have} rows on {table.entries.device}, to be compared are {self.rows} on "
                    f"{device}; give a row for each"
                )
        if not self.first.shape == self.end.shape == self.writers.shape:
            raise AttachError(
                f"{self.name}: first, end and writers must have one number a row, got shapes "
                f"{tuple(self.first.shape)}, {tuple(self.end.shape)} and {tuple(self.writers.shape)}"
            )
        if len(self.lens) > MOST_LENS:
            raise AttachError(f"{self.name}: at most {MOST_LENS} lens go with a table, got {len(self.lens)}; give two")
        for lens in self.lens:
            if lens.expected.shape != self.writers.shape or lens.given.device != device:
                raise AttachError(
                    f"{lens.name}: expected has shape {tuple(lens.expected.shape)} on {lens.given.device}, the table's "
                    f"rows are {self.rows} on {device}; give a length for each"
                )

    @classmethod
    def of_lens(cls, region: str, table: SlotTable, writers: Tensor, *lens: ReadLens) -> "ReadTable":
        """Lengths without a table: ``table``, the engine's own of ``region``, is compared nowhere."""
        none = torch.zeros_like(writers)
        return cls(lens[0].name, region, table, table, none, none, writers, lens=lens)

    @property
    def rows(self) -> int:
        """Number of compared batch rows."""
        return self.writers.shape[0]
