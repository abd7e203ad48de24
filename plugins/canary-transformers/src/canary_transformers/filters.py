"""Which findings the model or the cache's past explains."""

from typing import Any

import torch
from torch import Tensor

from canary_core.hookspecs import hookimpl
from canary_core.records import Kind
from canary_core.violation import Violation

REMEMBERED = 65536
"""Byte findings that `MovedSlots` remembers."""


class EmbeddingFilter:
    """Dismisses a `LOST_WRITE` where the old and the new token enter the model as the very same numbers.

    Then a correct store leaves the bytes as they were: two rows of the embedding are bit-identical (tied special
    tokens), or the new token's is all zero (padding) and what was there was zero. Reads the device, but only after a
    finding.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str | None:
        """The reason, where there is one."""
        if violation.kind is not Kind.LOST_WRITE or violation.token is None:
            return None
        rows = self._rows(violation.token, violation.stored_token)
        if rows is None:
            return None
        new, old = rows
        if not bool(new.any()):
            return f"the embedding of token {violation.token} is all zero"
        if old is not None and torch.equal(_bits(new), _bits(old)):
            return f"tokens {violation.token} and {violation.stored_token} have the same embedding"
        return None

    def _rows(self, token: int, old_token: int | None) -> tuple[Tensor, Tensor | None] | None:
        embeddings = self._model.get_input_embeddings()
        weight = getattr(embeddings, "weight", None)
        if not isinstance(weight, Tensor) or not 0 <= token < weight.shape[0]:
            return None
        known = old_token is not None and 0 <= old_token < weight.shape[0]
        return weight[token].detach(), weight[old_token].detach() if known else None


class AdoptedFilter:
    """Dismisses a `LOST_WRITE` into a slot whose bytes are from before Canary: from a cache that lived on, or from
    memory that was never cleared. The same prompt may have left the same bytes there."""

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str | None:
        """The reason, where there is one."""
        if violation.kind is Kind.LOST_WRITE and not violation.step_written:
            return "the bytes were there before Canary, and may be this very token's"
        return None


class MovedSlots:
    """Dismisses a byte finding that was reported before its slot moved: windows and beams carry wrong bytes along."""

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


def _bits(row: Tensor) -> Tensor:
    """The row's bytes: -0 and 0 differ, NaNs can be equal."""
    return row.contiguous().view(torch.uint8)
