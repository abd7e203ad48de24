"""Tokens that requests say they have, in rows of one table."""

from types import SimpleNamespace

import pytest
import torch
from canary_sglang.batches.tokens import expected_tokens

pytestmark = pytest.mark.without_engine


def test_expected_tokens_may_begin_later():
    """What comes before is unknown."""
    request = SimpleNamespace(origin_input_ids=[5, 6, 7], output_ids=[8])
    tokens = expected_tokens([request, None], [4, 4], torch.device("cpu"), [2, 0])
    assert tokens[:, :4].tolist() == [[-1, -1, 7, 8], [-1, -1, -1, -1]]
