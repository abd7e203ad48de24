from dataclasses import replace

import pytest
import torch

from canary_adapters import EmbeddedRequests, EmbeddingFilter
from canary_core import Kind, Phase, Violation

EMBEDDING = torch.tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 2.0], [3.0, 2.0], [0.0, -0.0], [float("nan"), 1.0]])


def row(token):
    """The row of a table of six tokens."""
    return EMBEDDING[token] if 0 <= token < len(EMBEDDING) else None


def lost(token, stored, kind=Kind.LOST_WRITE, region="full"):
    """A write of ``token`` that left the bytes of ``stored``."""
    return Violation(kind, region, Phase.POST_FORWARD, 3, 1, 0, token=token, stored_token=stored, step_written=2)


@pytest.mark.parametrize(
    ("token", "stored", "reason"),
    [
        (1, 2, "both tokens have the same embedding"),
        (5, 5, "same embedding"),
        (0, 3, "the embedding of the token is all zero"),
        (0, None, "all zero"),
        (4, 3, "all zero"),
    ],
)
def test_a_write_that_the_embedding_explains_is_dismissed(token, stored, reason):
    """The same bits, also of NaNs, or all zero."""
    assert reason in EmbeddingFilter(row).canary_dismiss(lost(token, stored))


@pytest.mark.parametrize(("token", "stored"), [(1, 3), (3, 0), (1, None), (None, 1), (99, 1), (1, 99), (-1, 2)])
def test_any_other_lost_write_stays(token, stored):
    """Different rows, tokens that are not known, and tokens without a row."""
    assert EmbeddingFilter(row).canary_dismiss(lost(token, stored)) is None


def test_other_findings_stay():
    """It is about lost writes only."""
    assert EmbeddingFilter(row).canary_dismiss(lost(1, 2, kind=Kind.BYTES)) is None


@pytest.mark.parametrize(("region", "dismissed"), [("draft.full", True), ("full", False)])
def test_only_regions_of_the_model_are_judged(region, dismissed):
    """Another model of the same engine has an embedding of its own."""
    reason = EmbeddingFilter(row, regions=["draft.full"]).canary_dismiss(lost(1, 2, region=region))
    assert (reason is not None) == dismissed


def test_writes_of_requests_that_were_given_embeddings_are_dismissed():
    """Their tokens stand for nothing; and so where they wrote what another's tokens are compared with now."""
    embedded = EmbeddedRequests()
    embedded.add("given")
    found = replace(lost(1, 3), request="given", stored_request="text")
    dismiss = EmbeddingFilter(row, embedded=embedded).canary_dismiss
    assert dismiss(found) == "given was given embeddings, not tokens"
    assert dismiss(replace(found, request="text", stored_request="given", token=None)) is not None
    assert dismiss(replace(found, request="text")) is None
    assert dismiss(replace(found, kind=Kind.BYTES)) is None


def test_the_last_requests_with_embeddings_are_remembered():
    """Not all of an engine that runs for months."""
    embedded = EmbeddedRequests(capacity=2)
    for name in ("a", "b", "a", "c"):
        embedded.add(name)
    assert [name in embedded for name in ("a", "b", "c")] == [True, False, True]
