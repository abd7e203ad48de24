"""`ToyRecomputer`: has requests of a toy engine computed again, by another toy engine."""

from collections.abc import Mapping, Sequence

import torch
from support.toy import ToyEngine

from canary_core import CachedRequest, CanaryError, Computed, Recomputer


class ToyRecomputer(Recomputer):
    """Requests that are in the engine's list have KV."""

    rounding = torch.finfo(torch.bfloat16).eps / 2

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine

    def requests(self) -> Sequence[str]:
        return [request.name for request in self._engine.requests]

    def cached(self, request: str) -> CachedRequest:
        found = next((one for one in self._engine.requests if one.name == request), None)
        if found is None:
            raise CanaryError(f"request {request!r} is not running: verify it before it ends")
        slots = torch.tensor(found.slots[: found.cached])
        return CachedRequest(request, found.tokens[: found.cached], {"full": slots})

    def compute(self, request: CachedRequest, chunk_tokens: int, jitter: float = 0.0) -> Mapping[str, Computed]:
        again = ToyEngine(slots=len(request.tokens) + 1)
        one = again.submit(request.request, list(request.tokens))
        again.forward(again.batch(chunk=len(request.tokens)))
        return {"full": Computed.within(again.region(), torch.tensor(one.slots))}
