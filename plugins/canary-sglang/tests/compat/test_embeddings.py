"""Lost writes that are none, since the embedding gives both tokens the same bytes."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from canary_sglang.compat import embeddings

from canary_adapters import EmbeddingFilter, EmbeddingShards
from canary_core import Kind, Phase, Violation

pytestmark = pytest.mark.without_engine


class VocabParallelEmbedding(torch.nn.Module):
    """As SGLang's: rows 0 to 3 of 8 on this rank, then padding. Rows 1 and 2 are alike, row 3 is zero."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [5.0, 6.0]]))
        self.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=4)
        self.tp_size = 2


@pytest.mark.parametrize(
    ("region", "new", "old", "dismissed"),
    [
        ("full", 0, 1, False),
        ("full", 1, 2, True),
        ("full", 3, 0, True),
        ("full", 0, 5, True),
        ("full", 5, 0, True),
        ("draft/full", 1, 2, False),
    ],
)
def test_a_lost_write_that_the_embedding_explains_is_dismissed(region, new, old, dismissed):
    """Rows that are alike or all zero leave the bytes as they were; of rows on a rank that tells nothing nobody knows.
    Only of the model's own regions."""
    model = torch.nn.Sequential(VocabParallelEmbedding())
    shards = EmbeddingShards(partial(embeddings.part, model), None, lambda: 0)
    known = EmbeddingFilter(shards.row, shards, ["full"])
    finding = Violation(Kind.LOST_WRITE, region, Phase.POST_FORWARD, 3, 1, 0, token=new, stored_token=old)
    assert (known.canary_dismiss(finding) is not None) is dismissed
