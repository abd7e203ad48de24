"""Requests of SGLang's scheduler, with touches, as counted by recompute."""

from collections.abc import Callable
from typing import Any

from canary_adapters import Running, TouchedRequests
from canary_core import Touch
from canary_sglang.compat import schedulers


class Touches(TouchedRequests):
    """Touches by the hits and retractions counted by SGLang in each request: nothing is followed meanwhile. ``find``:
    a running request by name, None for none."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        super().__init__()
        self._find = find

    def of(self, name: str) -> tuple[Touch, ...]:
        """See `TouchedRequests`."""
        request = self._find(name)
        return () if request is None else touches(request)


def touches(request: Any) -> tuple[Touch, ...]:
    """Touches of a request of SGLang's."""
    again = [Touch("preemption", running(request).tokens)] if request.retraction_count else []
    return (*again, *([Touch("hit", int(request.cached_tokens))] if request.cached_tokens else []))


def running(request: Any) -> Running:
    """A request of SGLang's with slots."""
    known = len(request.origin_input_ids) + len(request.output_ids)
    # The last token has no KV yet, or gets it in the forward under way; what a verification under way accepts is not
    # known yet.
    computed = schedulers.computed_length(request)
    tokens = min(known, known - 1 if computed is None else computed) if len(request.output_ids) else 0
    # Two requests may have one name.
    life = hash((id(request), request.retraction_count))
    more = request.lora_id is not None or schedulers.has_media(request) or schedulers.embedded(request)
    return Running(request.rid, tokens, max(0, tokens - len(request.origin_input_ids)), life, more)
