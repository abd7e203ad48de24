"""`PrefixLens`, `UniformLens` and `FirstRows`: lengths of rows, from what attention reads."""

import torch

from canary_adapters import FirstRows, PrefixLens, UniformLens


def test_prefix_lengths_are_those_before_the_new_tokens():
    """An extend takes both from the starts; what the host thinks of new tokens decides only which launches there are:
    with drafts it may be more than there are."""
    seq_lens, starts = torch.tensor([7, 3, 40], dtype=torch.int32), torch.tensor([0, 4, 5, 8], dtype=torch.int32)
    prefix_lens, new_lens = PrefixLens().of(seq_lens, starts, [4, 1, 5])
    assert (prefix_lens.tolist(), new_lens.tolist()) == ([3, 2, 37], [4, 1, 3])
    assert prefix_lens.dtype == new_lens.dtype == torch.int32


def test_first_elements_are_the_same_view_until_tensor_or_number_differ():
    """A tensor that the engine replaced is never shown by the view of the old one, and each name has its own."""
    firsts, kept = FirstRows(), torch.arange(8)
    view = firsts.of("lens", kept, 3)
    assert firsts.of("lens", kept, 3) is view
    kept[1] = 40
    assert view.tolist() == [0, 40, 2]
    assert firsts.of("slots", torch.zeros(8), 3).tolist() == [0, 0, 0]
    assert firsts.of("lens", kept, 4).tolist() == [0, 40, 2, 3]
    assert firsts.of("lens", kept.clone(), 4) is not firsts.of("lens", kept, 4)


def test_a_decode_has_one_new_token_in_each_row():
    """The new lengths of decodes are one static tensor, however many rows there are, up to the first ones."""
    lens, found = PrefixLens(), []
    for rows in (3, 5, 3):
        seq_lens = torch.arange(2, 2 + rows, dtype=torch.int32)
        prefix_lens, new_lens = lens.of(seq_lens, torch.arange(rows + 1, dtype=torch.int32), [1] * rows)
        assert prefix_lens.tolist() == list(range(1, 1 + rows))
        assert new_lens.tolist() == [1] * rows
        found.append(new_lens.data_ptr())
    assert len(set(found)) == 1


def test_uniform_lengths_are_static_for_each_number_and_dtype():
    """Until a batch is larger than all before: then there is a larger tensor."""
    uniform, like = UniformLens(), torch.zeros(4, dtype=torch.int32)
    ones, threes = uniform.of(1, like), uniform.of(3, like, torch.int64)
    assert (ones.tolist(), threes.tolist(), threes.dtype) == ([1] * 4, [3] * 4, torch.int64)
    assert uniform.of(1, like[:2]).data_ptr() == ones.data_ptr()
    assert uniform.of(1, torch.zeros(1000, dtype=torch.int32)).tolist() == [1] * 1000
    assert ones.tolist() == [1] * 4
