"""Findings explained by the model, or by the cache's own past."""

import re
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor

from canary_adapters import EmbeddingFilter, EmbeddingPart, EmbeddingShards
from canary_core import Kind, Violation, hookimpl

PLACEHOLDER = re.compile(r"(image|video|audio|vision|speech)\w*_token_(id|index)")
"""Names of a model's settings for tokens with another meaning than text."""

REMEMBERED = 65536
"""Findings remembered by `MovedBytesFilter`."""


def embedding_filter(model: Any) -> EmbeddingFilter:
    """Dismisses lost writes that the embedding of ``model`` explains. Never waits for another rank: with tensor
    parallelism rows on other ranks are not known."""
    if not hasattr(_weight(model), "to_local"):
        return EmbeddingFilter(partial(embedding_row, model))
    shards = EmbeddingShards(lambda: embedding_part(_weight(model)), lambda: 0, store=lambda: None)
    return EmbeddingFilter(shards.row, shards)


def embedding_row(model: Any, token: int) -> Tensor | None:
    """The row of ``token`` in the embedding of ``model``, None where there is none."""
    weight = _weight(model)
    if not isinstance(weight, Tensor) or not 0 <= token < weight.shape[0]:
        return None
    return weight[token].detach()


def embedding_part(weight: Any) -> EmbeddingPart:
    """The rank's whole rows of ``weight``, a `DTensor`: indexing would be a collective."""
    local = weight.to_local()
    placement = weight.placements[0] if len(weight.placements) == 1 else None
    if placement is not None and placement.is_replicate():
        return EmbeddingPart(local)
    if placement is not None and placement.is_shard(0):
        # Each rank has as many, but for the last ones.
        rows = -(-weight.shape[0] // weight.device_mesh.size())
        return EmbeddingPart(local, rows * weight.device_mesh.get_local_rank())
    return EmbeddingPart(local[:0])


def _weight(model: Any) -> Any:
    return getattr(model.get_input_embeddings(), "weight", None)


class EarlierBytesFilter:
    """Dismisses a `LOST_WRITE` into a slot never written under guard. Its bytes are older: in an adopted cache, or in
    memory never cleared, the same prompt may have left the same bytes."""

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str | None:
        """The reason, where there is one."""
        if violation.kind is Kind.LOST_WRITE and not violation.step_written:
            return "the bytes were there before Canary, and may be this very token's"
        return None


def placeholder_tokens(model: Any) -> frozenset[int]:
    """Tokens for an image, a video or sound in prompts of ``model``, by its configuration: given embeddings replace
    those of the table."""
    config = getattr(model, "config", None)
    named = {} if config is None else vars(config)
    return frozenset(value for name, value in named.items() if PLACEHOLDER.fullmatch(name) and isinstance(value, int))


class GivenEmbeddingFilter:
    """Dismisses a `LOST_WRITE` into memory of zeros, of a token with an unknown embedding: given in the place of
    tokens, or for an image. Such an embedding may be all zero, as for padding and for the output of an untrained
    projector, and so may its K and V be."""

    def __init__(self, placeholders: Collection[int]) -> None:
        self._placeholders = frozenset(placeholders)

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str | None:
        """The reason, where there is one."""
        if violation.kind is not Kind.LOST_WRITE or violation.step_written:
            return None
        if violation.token is None:
            return "its embedding was given, not its token, and may be all zero"
        if violation.token in self._placeholders:
            return "the token stands for other embeddings, which may be all zero"
        return None


class MovedBytesFilter:
    """Dismisses a `BYTES` finding reported before, at the slot of the bytes before a move: a window moving on, and
    reordered beams, copy wrong bytes to other slots."""

    def __init__(self) -> None:
        self._known: set[tuple[object, ...]] = set()

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str | None:
        """The reason, where there is one."""
        v = violation
        if v.kind is not Kind.BYTES:
            return None
        key = (v.source, v.stored_position, v.stored_token, v.stored_request, v.step_written, v.found_value)
        if key in self._known:
            return "the same bytes were reported at the slot where they were before"
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known.add(key)
        return None
