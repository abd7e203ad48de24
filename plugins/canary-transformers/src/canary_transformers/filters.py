"""Findings that the model, or the cache's own past, explains."""

from functools import partial
from typing import Any

from torch import Tensor

from canary_adapters import EmbeddingFilter, EmbeddingPart, EmbeddingShards
from canary_core import Kind, Violation, hookimpl

REMEMBERED = 65536
"""Findings that `MovedBytesFilter` remembers."""


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
    """The whole rows that this rank has of ``weight``, a `DTensor`: to index it would be a collective."""
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
    """Dismisses a `LOST_WRITE` into a slot that was never written under guard. Its bytes are older: in a cache that was
    taken over, or in memory that was never cleared, the same prompt may have left the same bytes."""

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str | None:
        """The reason, where there is one."""
        if violation.kind is Kind.LOST_WRITE and not violation.step_written:
            return "the bytes were there before Canary, and may be this very token's"
        return None


class MovedBytesFilter:
    """Dismisses a `BYTES` finding that was reported already, at the slot where the bytes were before: a window that
    moves on, and beams that are reordered, copy wrong bytes to other slots."""

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
