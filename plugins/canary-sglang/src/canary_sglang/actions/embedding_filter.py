"""Which findings the model itself explains."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from canary_core.hookspecs import hookimpl
from canary_core.records import Kind
from canary_core.violation import Violation


class EmbeddingFilter:
    """Dismisses a `LOST_WRITE` where the old and the new token enter the model as the very same numbers.

    Then a correct store leaves the bytes as they were: two rows of the embedding are bit-identical, or the new token's
    is all zero (padding of the vocabulary). Reads the device, but only after a finding. Where a row is on another
    tensor-parallel rank nobody knows, so that is dismissed, too. Only about ``regions``, those of ``model``.
    """

    def __init__(self, model: Any, regions: Collection[str]) -> None:
        self._model = model
        self._regions = frozenset(regions)

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str | None:
        """The reason, where there is one."""
        if violation.kind is not Kind.LOST_WRITE or violation.token is None or violation.region not in self._regions:
            return None
        new = self._row(violation.token)
        if self._elsewhere(violation.token) or self._elsewhere(violation.stored_token):
            return f"rows of tokens {violation.token} and {violation.stored_token} are not both on this rank"
        old = None if violation.stored_token is None else self._row(violation.stored_token)
        if new is None:
            return None
        if not bool(new.any()):
            return f"the embedding of token {violation.token} is all zero"
        if old is not None and torch.equal(_bits(new), _bits(old)):
            return f"tokens {violation.token} and {violation.stored_token} have the same embedding"
        return None

    def _elsewhere(self, token: int | None) -> bool:
        shard = getattr(self._embedding(), "shard_indices", None)
        if shard is None or token is None:
            return False
        return not shard.org_vocab_start_index <= token < shard.org_vocab_end_index

    def _row(self, token: int) -> Tensor | None:
        embedding = self._embedding()
        weight = getattr(embedding, "weight", None)
        if not isinstance(weight, Tensor):
            return None
        row = token - int(getattr(getattr(embedding, "shard_indices", None), "org_vocab_start_index", 0))
        return weight[row].detach() if 0 <= row < weight.shape[0] else None

    def _embedding(self) -> Any:
        return next((m for m in self._model.modules() if type(m).__name__ == "VocabParallelEmbedding"), None)


def _bits(row: Tensor) -> Tensor:
    """The row's bytes: -0 and 0 differ, NaNs can be equal."""
    return row.contiguous().view(torch.uint8)
