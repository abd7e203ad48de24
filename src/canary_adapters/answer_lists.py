"""`AnswerLists`: the ends of requests' answers in a scheduler's own lists, for its workers."""

from collections.abc import Callable, Container, Sequence, Sized
from typing import Protocol

from canary_adapters.answers import ANSWER_TOKENS, AnswerParts
from canary_core import Event, emit
from canary_core.errors import error_text

STEPS = 8
"""Batches from one with lists to the next, without speculation; with drafts as many fewer as a step has more tokens:
workers know the last `ANSWER_TOKENS` sampled ones."""

MOST_REQUESTS = 32
"""Running requests with lists in one message: more take turns, with twice as many batches from one message to the next.
As many requests that ended go beside, at most."""


class AnsweredRequest(Protocol):
    """A request in a scheduler, with names as in vLLM. ``_all_token_ids``: prompt and answer;
    `all_token_ids` is a view of it, at three times the cost."""

    request_id: str
    num_prompt_tokens: int
    _all_token_ids: list[int]


class Requests(Sized, Container[str], Protocol):
    """The names of a scheduler's requests."""


class AnswerLists:
    """Collects tokens appended to the lists of a scheduler's requests since the last message: of running requests in
    turns, and of each request at its end.

    ``running``: the running requests at present; ``known``: names of all requests until the end.
    ``drafted``: most tokens drafted for a request in a step. After an exception there are no lists any more, which is
    told; none reaches the scheduler.
    """

    def __init__(
        self, running: Callable[[], Sequence[AnsweredRequest]], known: Callable[[], Requests], drafted: int = 0
    ) -> None:
        self._running = running
        self._known = known
        self._steps = max(1, STEPS // (1 + drafted))
        # No more than come between two lists: each is looked at on the engine's thread.
        self._most = max(STEPS, min(1 + drafted, ANSWER_TOKENS))
        self._parts = AnswerParts()
        self._given: dict[str, int] = {}
        self._batches = self._turn = 0
        self._broken = False

    def ended(self, request: AnsweredRequest) -> None:
        """``request`` is over."""
        if self._broken:
            return
        try:
            if len(self._parts.requests) < MOST_REQUESTS:
                self._add((request,))
            self._given.pop(request.request_id, None)
        except Exception as error:
            self._breaks(error)

    def next(self, tokens: int) -> AnswerParts | None:
        """The lists to send with a batch of ``tokens``; None most of the time. A batch without tokens may be the last
        for a while."""
        self._batches += 1
        if (self._batches % self._steps and tokens) or self._broken:
            return None
        try:
            return self._taken(tokens)
        except Exception as error:
            self._breaks(error)
            return None

    def _breaks(self, error: Exception) -> None:
        self._broken = True
        reason = f"tokens that the scheduler appends are not compared: {error_text(error)}"
        emit(Event("hooks_left_out", "error", {"reason": reason}))

    def _taken(self, tokens: int) -> AnswerParts | None:
        running = self._running()
        if len(running) > MOST_REQUESTS and self._batches % (2 * self._steps) and tokens:
            return None
        self._add(self._chosen(running))
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

    def _add(self, requests: Sequence[AnsweredRequest]) -> None:
        # Flat: it is the engine's thread, and each call in Python is a part of what a request costs.
        parts, given, most = self._parts, self._given, self._most
        for request in requests:
            tokens, name = request._all_token_ids, request.request_id
            first, end = given.get(name, 0), len(tokens)
            if first < end - most:
                first = end - most
            if first < request.num_prompt_tokens:
                first = request.num_prompt_tokens
            if first < end:
                parts.requests.append(name)
                parts.firsts.append(first)
                parts.counts.append(end - first)
                parts.tokens += tokens[first:]
            given[name] = end
