"""`TokenBook`: the tokens of running requests by position, on the device, uploaded once each."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from canary_adapters import number_array

UNKNOWN = -1

LONG_RUN = 256
"""Numbers in a row that torch makes sooner than Python."""


class TokenBook:
    """Each request's tokens by position, from its own history, for comparison with slots.

    One row per request, kept while the request runs; the last batch's rows come first, in its order, and the least
    recently used make room for new ones. Takes at most ``budget_bytes``; positions beyond the budget are unknown.

    For each batch either `changes`, passed to `apply`, or `decoded`, with tokens for `write`; then `tokens` is
    complete.
    """

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device = device
        self._budget_tokens = max(budget_bytes // 4, 2)
        self._all = torch.full((0, 0), UNKNOWN, dtype=torch.int32, device=device)
        self._flat = self._all.view(-1)
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._free: list[int] = []
        self._last = _Batch([], [])
        self.tokens = self._all
        """Tokens of the last batch's requests by position, int32 ``[requests, n]``; -1 where the engine does not know a
        token yet (still computed by an earlier batch)."""
        self.places: list[int] = []
        """After `changes`: where the next token of each request goes."""
        self._narrow: tuple[Tensor, Tensor] = self._flat, self._flat

    def decoded(self, states: Sequence[Any], width: int) -> list[int] | None:
        """The new tokens, where ``states`` are the `RequestState` objects of the batch before, each with one token
        more, and there is room for ``width`` of each. To be passed to `write`, with places one on from the last ones.
        Else None, and nothing has changed."""
        last = self._last
        if width > self._all.shape[1] or not last.is_of(states):
            return None
        generated = [state.generated_tokens for state in states]
        if list(map(len, generated)) != last.expected:
            return None
        last.follow()
        return [tokens[-1] for tokens in generated]

    def write(self, places: Tensor, tokens: Tensor) -> None:
        """Writes ``tokens`` to ``places``: both int64 ``[n]``, on the device and contiguous. The same tensors may come
        again with other numbers."""
        if self._narrow[0] is not tokens:
            # The lower half of each number, without a launch for it.
            self._narrow = tokens, tokens.view(torch.int32)[::2]
        self._flat.index_copy_(0, places, self._narrow[1])

    def changes(self, states: Sequence[Any], width: int) -> tuple[Sequence[int], ...]:
        """Everything new in ``states``: four lists, for `apply` as tensors. Makes room for ``width`` tokens of each, if
        possible."""
        self._last.settle()
        self._fit(len(states), width)
        places = self._find(states)
        order = self._put_first(places)
        fresh = [place.row for place in places if place.known == 0]
        columns = self._all.shape[1]
        flat, tokens = array("q"), array("q")
        for place, state in zip(places, states, strict=True):
            prompt, generated = state.initial_tokens, state.generated_tokens
            first = place.known
            end = min(len(prompt) + len(generated), columns)
            if end > first:
                flat += _run(place.row * columns + first, place.row * columns + end)
                tokens += number_array(prompt[first:end], "q")
                tokens += number_array(generated[max(first - len(prompt), 0) : max(end - len(prompt), 0)], "q")
                place.known = end
        self._last = _Batch(list(states), places)
        self.places = [place.row * columns + place.known for place in places]
        return order, fresh, flat, tokens

    def apply(self, order: Tensor, fresh: Tensor, flat: Tensor, tokens: Tensor) -> None:
        """Applies the lists of `changes`, on the device."""
        if order.shape[0]:
            self._all = self._all.index_select(0, order)
            self._flat = self._all.view(-1)
        if fresh.shape[0]:
            self._all.index_fill_(0, fresh, UNKNOWN)
        if flat.shape[0]:
            self.write(flat, tokens)
        self.tokens = self._all[: len(self._last.states)]

    def _find(self, states: Sequence[Any]) -> list["_Place"]:
        """Each request's place; a new request's knows nothing."""
        if self._last.is_of(states):
            # No other request was seen since.
            return self._last.places
        for state in states:
            place = self._places.get(state.request_id)
            if place is not None:
                self._places.move_to_end(state.request_id)
                # A preempted request comes back as another state, and so does another request under a reused name.
                if place.state is not state:
                    place.state, place.known = state, 0
        for state in states:
            if state.request_id not in self._places:
                row = self._free.pop() if self._free else self._places.popitem(last=False)[1].row
                self._places[state.request_id] = _Place(row, state)
        return [self._places[state.request_id] for state in states]

    def _put_first(self, places: Sequence["_Place"]) -> list[int]:
        """Gives the batch's ``places`` the first rows. Returns the old row for each row; empty where nothing moves."""
        rows = [place.row for place in places]
        if rows == list(range(len(rows))):
            return []
        mine = set(rows)
        others = [place for place in self._places.values() if place.row not in mine]
        order = [*rows, *(place.row for place in others), *self._free]
        for row, place in enumerate((*places, *others)):
            place.row = row
        self._free = list(range(len(order) - len(self._free), len(order)))
        return order

    def _fit(self, rows: int, width: int) -> None:
        """Makes room for ``rows`` requests of ``width`` tokens, or as many as possible."""
        have_rows, have_width = self._all.shape
        limit = max(self._budget_tokens // (2 * rows), 1)
        width = min(width, limit)
        if width > have_width or rows > have_rows:
            # Powers of two, so that growth is rare; everything is uploaded again after it.
            new_width = min(max(have_width, _power_of_two(width)), limit)
            new_rows = min(max(have_rows, _power_of_two(2 * rows)), max(self._budget_tokens // new_width, rows))
            self._all = torch.full((new_rows, new_width), UNKNOWN, dtype=torch.int32, device=self._device)
            self._flat = self._all.view(-1)
            self._places.clear()
            self._last = _Batch([], [])
            self._free = list(reversed(range(new_rows)))


def _run(first: int, end: int) -> "array[int]":
    if end - first < LONG_RUN:
        return array("q", range(first, end))
    return array("q", torch.arange(first, end, device="cpu").numpy().tobytes())


class _Place:
    """A request's row, and its number of tokens there."""

    __slots__ = ("known", "row", "state")

    def __init__(self, row: int, state: Any) -> None:
        self.row = row
        self.state = state
        self.known = 0


class _Batch:
    """The requests of one batch. expected: each one's number of generated tokens after the next."""

    __slots__ = ("_ahead", "expected", "places", "states")

    def __init__(self, states: list[Any], places: list[_Place]) -> None:
        self.states = states
        self.places = places
        self.expected = [len(state.generated_tokens) + 1 for state in states]
        self._ahead = 0

    def is_of(self, states: Sequence[Any]) -> bool:
        """Whether ``states`` are the same objects."""
        return len(states) == len(self.states) and all(map(is_, states, self.states))

    def follow(self) -> None:
        """Each has one token more."""
        self.expected = [count + 1 for count in self.expected]
        self._ahead += 1

    def settle(self) -> None:
        """Passes the tokens counted by `follow` to the places."""
        for place in self.places if self._ahead else ():
            place.known += self._ahead
        self._ahead = 0


def _power_of_two(least: int) -> int:
    return 1 << (max(least, 1) - 1).bit_length()
