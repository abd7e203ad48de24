"""What ranks tell each other of their parts of an embedding."""

from types import SimpleNamespace

import pytest
import torch

from canary_adapters import EmbeddingFilter, EmbeddingPart, EmbeddingShards, embedding_shards
from canary_adapters.embedding_shards import row_hashes
from canary_core import Kind, Phase, Violation

SIZE = 6
"""Rows of each rank."""
GROUP = (4, 5)
"""Of the whole world's ranks."""


class Rank:
    """One of the ranks: rows of random numbers, of which the last is zero, and a count of its forwards."""

    def __init__(self, place, store, name=""):
        self.weight = torch.randn(SIZE, 8, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(place))
        self.weight[-1] = 0
        self.forwards = 0
        self.group = GROUP
        self.place = place
        self.shards = EmbeddingShards(self.part, lambda: self.forwards, name, lambda: store)

    def part(self):
        return EmbeddingPart(self.weight, SIZE * self.place, self.group, self.place)

    def told(self, new, old):
        """Whether a write of ``new`` that left the bytes of ``old`` stays a finding here."""
        lost = Violation(Kind.LOST_WRITE, "full", Phase.POST_FORWARD, 3, 1, 0, token=new, stored_token=old)
        return EmbeddingFilter(self.shards.row, self.shards).canary_dismiss(lost) is None


@pytest.fixture
def store():
    """As torch.distributed's, in this process."""
    return torch.distributed.HashStore()


@pytest.fixture
def ranks(store):
    """Two that have told."""
    both = [Rank(place, store) for place in (0, 1)]
    for rank in both:
        rank.shards.begin()
    return both


PAIRS = [(1, SIZE + 2), (SIZE + 2, 1), (1, 3), (SIZE + 1, SIZE + 3)]


@pytest.mark.parametrize(("new", "old"), PAIRS)
def test_a_lost_write_is_told_by_all_ranks(ranks, new, old):
    """Wherever the rows of its two tokens are."""
    assert [rank.told(new, old) for rank in ranks] == [True, True]


@pytest.mark.parametrize(("new", "old"), PAIRS)
def test_rows_that_are_alike_are_no_lost_write_on_any_rank(store, new, old):
    """Bit by bit, on one rank or on two."""
    ranks = [Rank(place, store) for place in (0, 1)]
    ranks[new // SIZE].weight[new % SIZE] = ranks[old // SIZE].weight[old % SIZE]
    for rank in ranks:
        rank.shards.begin()
    assert [rank.told(new, old) for rank in ranks] == [False, False]


@pytest.mark.parametrize(
    ("new", "old", "told"),
    [
        (SIZE - 1, SIZE + 2, False),
        (2 * SIZE - 1, 2, False),
        (2 * SIZE - 1, None, False),
        (2, 2 * SIZE - 1, True),
        (SIZE + 2, None, True),
    ],
)
def test_only_a_new_row_of_zeros_leaves_what_was_there(ranks, new, old, told):
    """The first row is that of a token whose bytes may be there already; the token before may not be known."""
    assert [rank.told(new, old) for rank in ranks] == [told, told]


def test_what_another_rank_has_not_told_is_not_known(store):
    """Its Canary may be off. Nobody waits for it, and what is on one's own rank is judged all the same."""
    rank = Rank(0, store)
    rank.shards.begin()
    assert not rank.told(1, SIZE + 2)
    assert rank.told(1, 2)


def test_tokens_that_no_rank_has_are_not_known(ranks):
    """Such as an engine's own numbers for pieces of an image."""
    assert not ranks[0].told(1, 1 << 40)


@pytest.mark.parametrize("odd", ["no store", "broken store", "no group", "broken weight"])
def test_where_ranks_cannot_talk_nothing_is_known_and_nothing_raised(odd, store):
    """Then a finding is dismissed."""

    def broken(*args):
        raise RuntimeError("gone")

    stores = {"no store": None, "broken store": SimpleNamespace(set=broken, check=broken)}
    ranks = [Rank(place, stores.get(odd, store)) for place in (0, 1)]
    for rank in ranks:
        if odd == "no group":
            rank.group = ()
        if odd == "broken weight":
            rank.weight = rank.weight[:, None].expand(SIZE, 3, 8).to("meta")
        rank.shards.begin()
        assert rank.shards.hashes([1, SIZE + 1]) is None


def test_a_rank_without_an_embedding_dismisses_nothing(store):
    """A later stage of a pipeline."""
    rank = Rank(0, store)
    rank.part = lambda: None
    rank.shards = EmbeddingShards(rank.part, lambda: 0, store=lambda: store)
    assert rank.told(1, SIZE + 2)
    assert not rank.shards.elsewhere(1)


def test_one_rank_that_has_all_tells_nothing(store):
    """It costs nothing there."""
    rank = Rank(0, store)
    rank.group = ()
    rank.shards.begin()
    assert store.num_keys() == 0
    assert rank.told(1, 2)


def test_weights_may_come_after_attaching(store):
    """What is told is what is there at the first forward."""
    ranks = [Rank(place, store) for place in (0, 1)]
    for rank in ranks:
        rank.weight = rank.weight * 2
        rank.shards.begin()
    assert [rank.told(1, SIZE + 2) for rank in ranks] == [True, True]


def replace(ranks, forwards):
    """New weights everywhere after so many forwards."""
    for rank in ranks:
        rank.weight = rank.weight * 2 + 1
        rank.forwards = forwards


def test_replaced_weights_are_not_known_until_both_ranks_have_told_them(ranks):
    """What a rank said of the old ones says nothing of the new ones."""
    first, second = ranks
    replace(ranks, 100)
    assert not first.told(1, SIZE + 2)
    second.forwards = 150
    assert not second.told(1, SIZE + 2), "the first was asked for the last time before the second has seen new rows"
    first.forwards = 160
    assert first.told(1, SIZE + 2)
    second.forwards = 170
    assert second.told(1, SIZE + 2)


def test_ranks_that_have_noticed_different_changes_do_not_mix_them(ranks):
    """One rank has told its rows after the first change, another only after the second."""
    first, second = ranks
    replace(ranks, 100)
    first.told(1, SIZE + 2)
    replace(ranks, 200)
    second.weight[2] = first.weight[1]
    assert not second.told(1, SIZE + 2)
    assert not first.told(1, SIZE + 2)
    first.forwards = second.forwards = 210
    assert not first.told(1, SIZE + 2)
    assert not second.told(1, SIZE + 2)
    assert second.told(1, SIZE + 3)


def test_models_and_groups_have_rows_of_their_own(store):
    """A draft model's tokens have other rows than the served one's, and so have those of another group of ranks."""
    Rank(1, store, name="draft").shards.begin()
    other = Rank(1, store)
    other.group = (6, 7)
    other.shards.begin()
    rank = Rank(0, store)
    assert rank.shards.hashes([SIZE]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (33, 12), (0, 8), (7, 5)])
def test_hashes_are_those_of_bits(dtype, rows, columns, monkeypatch):
    """Of each row alone, the same in slices of any size: any changed bit gives another hash, and so do words that have
    changed places; zeros of any sign give 0."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    hashes = row_hashes(weight)
    assert hashes.shape == (rows,)
    assert hashes.unique().numel() == rows
    monkeypatch.setattr(embedding_shards, "SLICE_BYTES", 1)
    assert row_hashes(weight).equal(hashes)
    for row in range(rows):
        other = weight.clone()
        bits = other.view(torch.uint8)
        bits[row, (5 * row) % bits.shape[1]] ^= 1 << row % 8
        assert (row_hashes(other) != hashes).nonzero().tolist() == [[row]]
        assert row_hashes(weight[row : row + 1]).tolist() == [int(hashes[row])]
    if rows:
        assert row_hashes(weight.flip(1))[0] != hashes[0]
        assert row_hashes(torch.zeros_like(weight) * -1).tolist() == [0] * rows
