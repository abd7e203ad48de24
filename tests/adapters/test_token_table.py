"""`token_table`: the requests' own tokens by position."""

import torch

from canary_adapters import TABLE_STEP, token_table, unknown_tokens
from canary_adapters.token_table import MOST_TOKENS

CPU = torch.device("cpu")


def test_a_row_has_the_tokens_that_are_known():
    """Rows of which nothing is known, or less than the longest, end with -1; the width is a multiple of a step."""
    table = token_table([torch.arange(20), None, torch.arange(3)], 17, CPU)
    assert table.shape == (3, 2 * TABLE_STEP)
    assert table.dtype == torch.int32
    assert table[0, :20].tolist() == list(range(20))
    assert table[2, :3].tolist() == [0, 1, 2]
    assert (table[0, 20:] == -1).all()
    assert (table[1] == -1).all()
    assert (table[2, 3:] == -1).all()


def test_a_table_has_a_largest_size():
    """Of a batch that is both long and wide the first positions are known."""
    table = token_table([torch.arange(100)] * 3, MOST_TOKENS, CPU)
    assert table.numel() <= MOST_TOKENS + 3 * TABLE_STEP
    assert table[2, :100].tolist() == list(range(100))


def test_an_adapter_may_fill_the_rows_itself():
    """It is given what `token_table` would make of the same rows, before anything is known of them; numpy's views of
    its rows write to it."""
    table = unknown_tokens(2, 17, CPU)
    assert torch.equal(table, token_table([None, None], 17, CPU))
    table.numpy()[1, :3] = range(3)
    assert torch.equal(table, token_table([None, torch.arange(3)], 17, CPU))
    assert unknown_tokens(3, MOST_TOKENS, CPU).shape == token_table([None] * 3, MOST_TOKENS, CPU).shape
