"""`AnswerLists`: the ends of requests' answers in a scheduler's own lists, for its workers."""

from collections.abc import Callable, Container, Sequence, Sized
from typing import Protocol

from canary_adapters.answers import ANSWER_TOKENS, AnswerParts

STEPS = 8
"""Batches from one with lists to the next, without speculation; with drafts as many fewer as a step has more tokens:
workers know the last `ANSWER_TOKENS` sampled ones."""

MOST_REQUESTS = 256
"""Running requests with lists in one message: more take turns. As many requests that ended go beside, at most."""


class AnsweredRequest(Protocol):
    """A request in a scheduler, with names as in vLLM. ``all_token_ids``: a list of prompt and answer."""

    request_id: str
    num_prompt_tokens: int
    all_token_ids: Sequence[int]


class Requests(Sized, Container[str], Protocol):
    """The names of a scheduler's requests."""


class AnswerLists:
    """Collects tokens appended to the lists of a scheduler's requests since the last message: of running requests in
    turns, and of each request at its end.

    ``running``: the running requests at present; ``known``: names of all requests until the end.
    ``drafted``: most tokens drafted for a request in a step.
    """

    def __init__(
        self, running: Callable[[], Sequence[AnsweredRequest]], known: Callable[[], Requests], drafted: int = 0
    ) -> None:
        self._running = running
        self._known = known
        self._steps = max(1, STEPS // (1 + drafted))
        self._parts = AnswerParts()
        self._given: dict[str, int] = {}
        self._batches = self._turn = 0

    def ended(self, request: AnsweredRequest) -> None:
        """``request`` is over."""
        if len(self._parts.requests) < MOST_REQUESTS:
            self._add(request)
        self._given.pop(request.request_id, None)

    def next(self, tokens: int) -> AnswerParts | None:
        """The lists to send with a batch of ``tokens``; None most of the time. A batch without tokens may be the last
        for a while."""
        self._batches += 1
        if self._batches % self._steps and tokens:
            return None
        for request in self._chosen(self._running()):
            self._add(request)
        known = self._known()
        if len(self._given) > MOST_REQUESTS + len(known):
            # Not every request is seen to end.
            self._given = {name: end for name, end in self._given.items() if name in known}
        parts, self._parts = self._parts, AnswerParts()
        return parts

    def _chosen(self, running: Sequence[AnsweredRequest]) -> Sequence[AnsweredRequest]:
        if len(running) <= MOST_REQUESTS:
            return running
        first = self._turn if self._turn < len(running) else 0
        self._turn = first + MOST_REQUESTS
        return running[first : self._turn]

    def _add(self, request: AnsweredRequest) -> None:
        tokens, name = request.all_token_ids, request.request_id
        end = len(tokens)
        first = max(request.num_prompt_tokens, end - ANSWER_TOKENS, min(self._given.get(name, 0), end))
        if first < end:
            self._given[name] = end
            self._parts.add(name, first, list(tokens[first:]))
