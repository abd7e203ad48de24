"""Lists of blocks, without an engine. Those that attention is given: `test_tables` of the plugins."""

from canary_adapters import moved_states


def test_states_that_go_on_in_another_block_move() -> None:
    """A row whose last token lies in another block of tokens than the one before the forward; not one that begins, one
    that stays, or one whose blocks are not known."""
    blocks = [[4, 5], [6], [7, 8], None, [0, 9, 3]]
    assert moved_states(32, [32, 3, 0, 32, 70], [1, 29, 40, 1, 5], blocks) == [(4, 5)]
    assert moved_states(32, [33, 64], [31, 1], [[4, 5], [0, 9, 3]]) == [(9, 3)]
