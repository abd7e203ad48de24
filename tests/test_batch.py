"""`BatchView`: rows whose prefix hash starts at 0; what does not fit together is refused."""

import pytest
import torch

from canary_adapters import ragged_table
from canary_core import AttachError, BatchView, Canary, CanaryConfig, KVSource, Region, SlotTable, StateCheckpoints
from canary_core.records import PREFIX_HASH

GOOD = {
    "prefix_lens": torch.tensor([0, 2]),
    "new_lens": torch.tensor([2, 1]),
    "token_ids": torch.tensor([5, 6, 7]),
    "writers": torch.tensor([0, 1]),
}
"""Two requests of a batch, without a table."""

ENTRIES = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0]])


def forward(canary: Canary, entries: torch.Tensor, row: int, lens: tuple[int, int], anchors: bool) -> None:
    """One request writes ``lens[1]`` tokens after ``lens[0]``; ``anchors``: from the common one."""
    batch = BatchView(
        prefix_lens=torch.tensor([lens[0]]),
        new_lens=torch.tensor([lens[1]]),
        token_ids=torch.arange(lens[1]) + 100 * row,
        writers=torch.tensor([row], dtype=torch.int32),
        tables={"full": SlotTable(entries, rows=torch.tensor([row]))},
        anchors=None if anchors else torch.zeros(1, dtype=torch.int64),
    )
    canary.step.before(batch)
    for slot in entries[row, lens[0] : sum(lens)].tolist():
        next(iter(canary.regions.values())).sources[0].tensor[slot] = slot + 1
    canary.step.after(batch)
    canary.drain()


@pytest.mark.parametrize("anchored", [True, False])
def test_a_row_without_an_anchor_may_have_anothers_slot(anchored: bool) -> None:
    """The slot of another request's token at the same position breaks the prefix of an anchored row only; one of
    another position is found in either."""
    pool = torch.zeros(16, 8)
    canary = Canary([Region("full", 16, (KVSource(pool, "k", 0, 32, 32),))], CanaryConfig.load(backend="torch"))
    entries = torch.tensor([[4, 5, 6, 0, 0, 0], [1, 2, 3, 7, 8, 9]])
    forward(canary, entries, 0, (0, 3), anchored)
    forward(canary, entries, 1, (0, 3), anchored)
    known = canary.states["full"].records[1:7, PREFIX_HASH : PREFIX_HASH + 2] != 0
    assert bool(known.any()) is anchored
    entries[1, 1] = 5
    forward(canary, entries, 1, (3, 1), anchored)
    assert canary.stats().get("prefix", 0) == (2 if anchored else 0)
    before = canary.stats()["violations"]
    entries[1, 1] = 4
    forward(canary, entries, 1, (4, 1), anchored)
    assert canary.stats().get("position", 0) == 1
    assert canary.stats()["violations"] > before
    canary.close()


@pytest.mark.parametrize(
    ("slots", "positions"),
    [
        (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2])),
        (torch.tensor([1, 2]), torch.tensor([1])),
        (torch.tensor([[1]]), torch.tensor([1])),
    ],
)
def test_checkpoints_that_do_not_fit_together_are_refused(slots, positions):
    """Types and shapes, where it is made."""
    with pytest.raises(AttachError, match="checkpoints"):
        StateCheckpoints(slots, positions)


@pytest.mark.parametrize("field", [*GOOD, "positions", "expected_tokens", "anchors"])
def test_a_list_is_no_tensor(field):
    """Each field by its name, with what was got and who is to mend it: never an AttributeError."""
    with pytest.raises(AttachError, match=f"batch: {field} must be a tensor, got a list; .* in the adapter"):
        BatchView(**{**GOOD, "tables": {"full": SlotTable(ENTRIES)}, field: [0, 2]})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SlotTable([[1, 2]]), "slot table: entries must be a tensor, got a list"),
        (lambda: SlotTable(ENTRIES, rows=[0, 1]), "slot table: rows must be a tensor, got a list"),
        (lambda: SlotTable(ENTRIES, write_slots=[0]), "slot table: write_slots must be a tensor, got a list"),
        (lambda: StateCheckpoints([1], [2]), "checkpoints: slots must be a tensor, got a list"),
        (lambda: ragged_table([1, 2], torch.tensor([0])), "ragged table: flat must be a tensor, got a list"),
        (
            lambda: BatchView(**GOOD, tables=[ENTRIES]),
            "batch: tables must map names of regions .* got a list",
        ),
        (
            lambda: BatchView(**GOOD, tables={"full": ENTRIES}),
            "'full' must be a SlotTable, got a Tensor",
        ),
    ],
)
def test_a_table_is_made_of_tensors(make, says):
    """What was got is said where it is made."""
    with pytest.raises(AttachError, match=says):
        make()


def test_each_token_needs_a_place_to_be_written_to():
    """A list of write slots that is shorter than the tokens, or of rows that is shorter than the requests, describes
    another forward. A static buffer may be longer."""
    short = {"full": SlotTable(ENTRIES, write_slots=torch.tensor([1, 2]))}
    with pytest.raises(AttachError, match="region 'full' has 2 write_slots for 3 token_ids; give one for each token"):
        BatchView(**GOOD, tables=short)
    with pytest.raises(AttachError, match="table of region 'full' has 1 rows, the batch 2; give one for each request"):
        BatchView(**GOOD, tables={"full": SlotTable(ENTRIES, rows=torch.tensor([1]))})
    longer = {"full": SlotTable(ENTRIES, rows=torch.arange(4), write_slots=torch.arange(9))}
    assert BatchView(**GOOD, tables=longer).tokens == 3
