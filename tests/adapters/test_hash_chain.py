"""`HashChain`: once a block is wrong, so is what was computed from it."""

import pytest

from canary_adapters import HashChain
from canary_adapters import hash_chain as module

A, B, C, D, X, Y = (name.encode() for name in "abcdxy")


@pytest.mark.parametrize(
    ("wrong", "gone"), [([1], {1, 2, 3, 4, 9}), ([2], {2, 3, 9}), ([3], {3, 9}), ([5], {5, 6, 9}), ([], {9})]
)
def test_what_descends_from_a_wrong_block_goes_with_it(wrong, gone):
    """a-b-c and a-d branch, x-y is alone; nobody knows what block 9 was computed from."""
    chain = HashChain()
    chain.note([A, B], 0)
    chain.note([A, B, C], 2)
    chain.note([A, D], 1)
    chain.note([X, Y], 0)
    assert chain.after(wrong, {1: A, 2: B, 3: C, 4: D, 5: X, 6: Y, 9: b"?"}) == gone


def test_of_two_blocks_with_one_hash_both_go():
    """Two requests computed the same prefix at once: who read which is not known."""
    chain = HashChain()
    chain.note([A, B], 0)
    chain.note([A, C], 1)
    assert chain.after([1], {1: A, 2: B, 7: A, 8: C}) == {1, 2, 7, 8}


def test_an_uncached_block_before_leaves_the_origin_unknown():
    """As after it was evicted under a running request."""
    chain = HashChain()
    chain.note([A, None, C], 0)
    assert chain.after([], {1: A, 3: C}) == {3}


def test_memory_is_bounded(monkeypatch):
    """The oldest are forgotten: their blocks are of unknown origin."""
    monkeypatch.setattr(module, "MOST_HASHES", 2)
    chain = HashChain()
    chain.note([A, B, C], 0)
    assert chain.after([], {1: A, 2: B, 3: C}) == {1, 2, 3}
    chain.note([A, B], 0)
    assert chain.after([], {1: A, 2: B}) == set()
