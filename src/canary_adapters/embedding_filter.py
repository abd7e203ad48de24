"""`EmbeddingFilter`: dismisses writes that look lost because two tokens enter the model as the same numbers."""

from collections import OrderedDict
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from canary_adapters.embedding_shards import EmbeddingShards
from canary_core import Kind, Violation, Writers, hookimpl


class EmbeddedRequests:
    """Requests with embeddings in the place of tokens, by the names in findings; the last ``capacity`` of them."""

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._names: OrderedDict[str, None] = OrderedDict()

    def add(self, request: str) -> None:
        """Adds a request."""
        name = Writers.told(request)
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._capacity:
            self._names.popitem(last=False)

    def __contains__(self, request: object) -> bool:
        return request in self._names


class EmbeddingFilter:
    """Dismisses a `LOST_WRITE` where the old and the new token have the same embedding, and an `ARRIVAL` of or after a
    request with embeddings.

    Then a correct store leaves the bytes unchanged: two rows of the embedding are bit-identical (tied special tokens),
    or the new token's is all zero (padding) and the old bytes were zero. Reads the device, but only after a finding.

    ``row(token)``: the token's row of the embedding, None where there is none. ``shards``: where other ranks may have
    some of the rows; rows not reported are unknown, and the finding is dismissed as well. ``regions``: names of the
    regions concerned, None for all. ``embedded``: requests with embeddings, whose tokens say nothing about the bytes;
    the embeddings of a text already cached write the same bytes.
    """

    def __init__(
        self,
        row: Callable[[int], Tensor | None],
        shards: EmbeddingShards | None = None,
        regions: Collection[str] | None = None,
        embedded: EmbeddedRequests | None = None,
    ) -> None:
        self._embedded = embedded or EmbeddedRequests()
        self._row = row
        self._shards = shards
        self._regions = None if regions is None else frozenset(regions)

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str | None:
        """The reason, where there is one."""
        token, old = violation.token, violation.stored_token
        if violation.kind not in (Kind.LOST_WRITE, Kind.ARRIVAL):
            return None
        if self._regions is not None and violation.region not in self._regions:
            return None
        for request in (violation.request, violation.stored_request):
            if request in self._embedded:
                return f"{request} was given embeddings, not tokens"
        if token is None or violation.kind is Kind.ARRIVAL:
            return None
        if self._shards is not None and any(self._shards.elsewhere(t) for t in (token, old) if t is not None):
            hashes = self._shards.hashes(t for t in (token, old) if t is not None)
            if hashes is None:
                return "the rows of the two tokens are not both on this rank, and the other one's is not known"
            zero, same = hashes[0] == 0, old is not None and hashes[0] == hashes[-1]
        else:
            new_row = self._row(token)
            old_row = None if old is None else self._row(old)
            if new_row is None:
                return None
            zero = not bool(new_row.any())
            same = old_row is not None and torch.equal(_bits(new_row), _bits(old_row))
        if zero:
            return "the embedding of the token is all zero"
        return "both tokens have the same embedding" if same else None


def _bits(row: Tensor) -> Tensor:
    """The row's bytes: -0 and 0 differ, NaNs can be equal."""
    return row.detach().contiguous().view(torch.uint8)
