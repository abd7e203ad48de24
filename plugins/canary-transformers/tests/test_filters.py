from types import SimpleNamespace

import pytest
import torch
from canary_transformers.filters import EarlierBytesFilter, MovedBytesFilter, embedding_filter, embedding_row
from tiny.models import generating
from torch.distributed.tensor import Replicate, Shard

from canary_core import Kind, Phase, Violation


def finding(kind=Kind.LOST_WRITE, **fields):
    """One about slot 1."""
    about = {"token": 7, "stored_token": 8, "step_written": 2, "source": "k.0", "found_value": 5, **fields}
    return Violation(kind, "full", Phase.POST_FORWARD, 3, 1, 0, **about)


def test_rows_are_those_of_the_models_embedding():
    """By token; there is none of a token that the vocabulary does not have."""
    model = generating("llama")
    assert torch.equal(embedding_row(model, 7), model.model.embed_tokens.weight[7])
    assert embedding_row(model, -1) is embedding_row(model, 256) is None
    reason = embedding_filter(model).canary_dismiss(finding(token=0))
    assert reason == "the embedding of the token is all zero"


@pytest.mark.parametrize(
    ("placements", "new", "old", "reason"),
    [
        ([Shard(0)], 3, 4, None),
        ([Shard(0)], 3, 5, "same embedding"),
        ([Shard(0)], 3, 1, "not both on this rank"),
        ([Shard(0)], 6, 3, "not both on this rank"),
        ([Replicate()], 0, 1, None),
        ([Replicate()], 0, 2, "same embedding"),
        ([Shard(1)], 0, 1, "not both on this rank"),
        ([Replicate(), Shard(0)], 0, 1, "not both on this rank"),
    ],
)
def test_of_an_embedding_that_is_spread_over_ranks_only_rows_that_are_here_are_looked_at(placements, new, old, reason):
    """To look at others would be a collective, and wait for ranks that have found nothing. Here the second of three
    ranks has rows 3 to 5 of 7."""
    mesh = SimpleNamespace(size=lambda: 3, get_local_rank=lambda: 1)
    local = torch.tensor([[1.0], [2.0], [1.0]])
    weight = SimpleNamespace(to_local=lambda: local, placements=placements, device_mesh=mesh, shape=(7, 1))
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=weight))
    told = embedding_filter(model).canary_dismiss(finding(token=new, stored_token=old))
    assert told is None if reason is None else reason in told


@pytest.mark.parametrize(
    ("violation", "dismissed"),
    [(finding(step_written=0), True), (finding(), False), (finding(Kind.BYTES, step_written=0), False)],
)
def test_bytes_from_before_canary_explain_a_lost_write(violation, dismissed):
    """Only a slot that was never written under guard has such bytes."""
    assert (EarlierBytesFilter().canary_dismiss(violation) is not None) == dismissed


@pytest.mark.parametrize(
    ("again", "dismissed"),
    [
        (finding(Kind.BYTES), True),
        (finding(Kind.BYTES, found_value=6), False),
        (finding(Kind.BYTES, source="v.0"), False),
        (finding(Kind.LOST_WRITE), False),
    ],
)
def test_bytes_that_moved_are_reported_once(again, dismissed):
    """The same source, token and value at another slot is the same damage."""
    moved = MovedBytesFilter()
    assert moved.canary_dismiss(finding(Kind.BYTES)) is None
    assert (moved.canary_dismiss(again) is not None) == dismissed
