"""Lost writes that are none, since the embedding gives both tokens the same bytes."""

import sys
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
    shards = EmbeddingShards(partial(embeddings.part, model), lambda: 0, store=lambda: None)
    known = EmbeddingFilter(shards.row, shards, ["full"])
    finding = Violation(Kind.LOST_WRITE, region, Phase.POST_FORWARD, 3, 1, 0, token=new, stored_token=old)
    assert (known.canary_dismiss(finding) is not None) is dismissed


@pytest.mark.parametrize(
    ("size", "attention", "group", "place"),
    [(4, False, [0, 1, 2, 3], 3), (2, True, [2, 3], 1), (1, True, [], 0), (4, True, [], 0), (2, False, [], 0)],
)
def test_parts_are_those_of_the_ranks_over_which_the_layer_is_spread(monkeypatch, size, attention, group, place):
    """With data-parallel attention that is the attention's group, or the layer is whole. Where the layer has another
    number of parts than its group has ranks, nobody is known who has them."""

    def ranks(*group):
        return lambda: SimpleNamespace(ranks=list(group), world_size=len(group), rank_in_group=group.index(3))

    state = SimpleNamespace(get_tp_group=ranks(0, 1, 2, 3), get_attn_tp_group=ranks(2, 3))
    for name in ("sglang", "sglang.srt", "sglang.srt.distributed"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(parallel_state=state))
    layer = VocabParallelEmbedding()
    layer.tp_size, layer.use_attn_tp_group = size, attention
    part = embeddings.part(torch.nn.Sequential(layer))
    assert (list(part.group), part.place, part.first, len(part.weight)) == (group, place, 0, 4)
