"""The ledger's table against a plain model, and what it says where it has forgotten."""

from collections import OrderedDict

import torch
from hypothesis import given
from hypothesis import strategies as st

from canary_core.watchers.ledger.doubt import Doubt
from canary_core.watchers.ledger.table import DOUBT_SHARE, ENTRY_BYTES, MOST_VARIANTS, ROW_BYTES, Table

SOURCES = 3
ENTRY = 8 * SOURCES + ROW_BYTES + ENTRY_BYTES


def room(entries):
    """Bytes for a table of so many entries, and of what is in doubt beside them."""
    return entries * ENTRY * DOUBT_SHARE // (DOUBT_SHARE - 1) + 2


def values(*numbers):
    """One row of values for each number, all of them different from those of another."""
    return torch.tensor([[n, n * 7, -n] for n in numbers], dtype=torch.int64).view(-1, SOURCES)


def add(table, *pairs, condemned=False):
    """Adds (hash, number) pairs in one call."""
    hashes = torch.tensor([h for h, _ in pairs], dtype=torch.int64)
    table.add(hashes, hashes * 3, values(*(v for _, v in pairs)), condemned)


def has(table, hash, number):
    """Whether an entry of ``hash`` has the values of ``number``."""
    return table.match([hash], values(number))[0].equal


PAIRS = st.lists(st.tuples(st.integers(-4, 4), st.integers(1, 3)), max_size=6)


@given(st.lists(PAIRS, max_size=12), st.integers(1, 9))
def test_it_says_what_a_plain_model_says(batches, capacity):
    """Whatever it holds was added; what was added is there, or the prefix is in doubt; it is never larger than it may
    be, and of a prefix that is not in doubt it has all that was ever added."""
    table = Table(SOURCES, room(capacity))
    added: OrderedDict[int, set[int]] = OrderedDict()
    for batch in batches:
        add(table, *batch)
        for hash, number in batch:
            added.setdefault(hash, set()).add(number)
        assert table.entries <= capacity == table.capacity
        for hash, numbers in added.items():
            stored = {n for n in range(1, 4) if has(table, hash, n)}
            assert stored <= numbers
            assert stored == numbers or hash in table.doubt
    assert table.size_bytes == table.entries * ENTRY + table.doubt.size_bytes
    hashes, sums, rows = table.rows()
    assert len(hashes) == table.entries
    assert torch.equal(sums, hashes * 3)
    assert all(has(table, h, r) for h, (r, _, _) in zip(hashes.tolist(), rows.tolist(), strict=True))


def test_what_is_used_stays():
    """An entry that is added again, or matched and added as arrivals are, outlives those that nobody asked for."""
    table = Table(SOURCES, room(8))
    add(table, (1, 1))
    for number in range(2, 40):
        add(table, (number, number), (1, 1))
    assert has(table, 1, 1)
    assert not has(table, 2, 2)
    assert 1 not in table.doubt
    assert 2 in table.doubt
    assert table.evicted > 20


def test_all_entries_of_a_hash_go_together():
    """Where one of several was overwritten, the others prove nothing."""
    table = Table(SOURCES, room(4))
    add(table, (1, 1), (1, 2))
    add(table, (2, 1), (3, 1), (4, 1))
    assert [has(table, 1, 1), has(table, 1, 2)] == [False, False]
    assert 1 in table.doubt
    assert (table.entries, table.evicted) == (3, 2)


def test_too_many_variants_leave_a_hash_in_doubt():
    """Those that are there stay and match; others may have been stored, too."""
    table = Table(SOURCES, room(99))
    add(table, *((1, n) for n in range(1, MOST_VARIANTS + 2)))
    assert has(table, 1, MOST_VARIANTS)
    assert not has(table, 1, MOST_VARIANTS + 1)
    assert 1 in table.doubt


def test_the_nearest_entry_is_the_one_to_blame():
    """A block that differs in one source from one entry and in all from another."""
    table = Table(SOURCES, room(9))
    add(table, (1, 5), (1, 6))
    found = values(6)
    found[0, 1] += 1
    match = table.match([1], found)[0]
    assert (match.entries, match.equal) == (2, False)
    assert (table.values(match.nearest) != found[0]).tolist() == [False, True, False]


def test_condemned_entries_are_no_entries():
    """They match, and say that they are wrong; they are not exported."""
    table = Table(SOURCES, room(9))
    add(table, (1, 5))
    add(table, (1, 6), condemned=True)
    add(table, (1, 6))
    match = table.match([1], values(6))[0]
    assert (match.entries, match.equal, match.condemned) == (1, True, True)
    assert table.rows([1])[2].tolist() == values(5).tolist()


def test_it_takes_no_memory_before_it_is_used():
    """Nor after for what was not asked: nothing to match gives nothing."""
    table = Table(SOURCES, 1 << 30)
    assert table.match([1, 2], values(1, 2)) == table.match([3, 4], values(3, 4))
    assert (table.entries, table.size_bytes) == (0, 0)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 64))
def test_doubt_never_forgets(hashes, size):
    """Whatever was added is in it; an empty one has nothing."""
    doubt = Doubt(size)
    assert not any(hash in doubt for hash in hashes)
    doubt.add(hashes)
    assert all(hash in doubt for hash in hashes)
    assert doubt.added == len(hashes)
    doubt.everything = True
    assert 12345 in doubt


def test_doubt_seldom_errs():
    """With 8 bits an entry, as after the default ledger with 64 sources has evicted 32 million blocks, about one hash
    in forty that was never added is in doubt; with 4 bits, after 64 million, about one in six."""
    random = torch.Generator().manual_seed(0)
    hashes = torch.randint(-(2**62), 2**62, (60_000,), generator=random)
    doubt = Doubt(16384)
    for added, least, most in ((16384, 0.01, 0.04), (32768, 0.1, 0.2)):
        doubt.add(hashes[doubt.added : added].tolist())
        wrong = float(doubt.has(hashes[added:]).float().mean())
        assert least < wrong < most
        assert least < doubt.ratio() < most
        assert bool(doubt.has(hashes[:added]).all())


def test_all_memory_is_within_what_was_given():
    """A full table and a full doubt take no more than they may."""
    table = Table(SOURCES, room(100))
    add(table, *((n * (1 << 50) + n, n) for n in range(1, 400)))
    assert (table.entries, table.doubt.added) == (table.capacity, 399 - table.capacity)
    assert table.size_bytes <= room(100)


def test_bytes_from_elsewhere_are_nobodys_also_in_a_row_that_was_somebodys():
    """A row is used again for the same content, stored by another engine or found wrong: it proves nothing any more."""
    for condemned in (False, True):
        table = Table(SOURCES, room(1))
        one, two = (torch.tensor([hash], dtype=torch.int64) for hash in (1, 2))
        table.add(one, one * 3, values(1), who=one << 32)
        assert [holder.hash for holder in table.holders(values(1))] == [1]
        table.add(two, two * 3, values(1), condemned, who=two << 32 if condemned else None)
        assert table.holders(values(1)) == [None]
