"""`sampled_tokens`: the last one of each row in the last column."""

import torch

from canary_adapters import sampled_tokens


def test_what_follows_the_last_token_comes_last():
    """What follows a row's drafts is listed from the left; rows with fewer of them move to the right, and
    say nothing of the positions before."""
    tokens = torch.tensor([[11, 12, 13], [21, -1, -1], [31, 32, -1]], dtype=torch.int32)
    given = sampled_tokens(tokens, [2, 0, 1])
    assert given.tolist() == [[11, 12, 13], [-2, -2, 21], [-2, 31, 32]]
    assert sampled_tokens(tokens, [2, 2, 2]) is tokens
    assert sampled_tokens(tokens, None) is tokens
