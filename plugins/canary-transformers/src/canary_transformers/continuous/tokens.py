"""`TokenBook`: the tokens of running requests by position, on the device, uploaded once each."""

from collections import OrderedDict
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from canary_transformers.continuous.upload import upload_lists

UNKNOWN = -1


class TokenBook:
    """Each request's tokens by position, from its own history: what slots are compared with.

    One row per request, kept while the request runs; the least recently used make room for new ones. Takes at most
    ``budget_bytes``; positions beyond what that can hold are unknown.
    """

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device = device
        self._budget_tokens = max(budget_bytes // 4, 2)
        self._tokens = torch.full((0, 0), UNKNOWN, dtype=torch.int32, device=device)
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._free: list[int] = []
        # The last states that were looked for, and where they are.
        self._last: tuple[list[Any], list[_Place]] = ([], [])
        self._taken: tuple[slice | None, int] = (None, 0)

    def expected(self, states: Sequence[Any], width: int) -> Tensor:
        """The tokens of `RequestState`s ``states`` by position, int32 ``[len(states), up to width]``; -1 where the
        engine does not know them yet (a token that an earlier batch is still computing)."""
        return self.take(*upload_lists(self.changes(states, width), self._device))

    def changes(self, states: Sequence[Any], width: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """The first half of `expected`, for who has more to upload: four lists, of which `take` wants the tensors."""
        width = self._fit(len(states), width)
        places = self._find(states)
        fresh = [place.row for place in places if place.known == 0]
        columns = self._tokens.shape[1]
        flat: list[int] = []
        tokens: list[int] = []
        for place, state in zip(places, states, strict=True):
            prompt, generated = state.initial_tokens, state.generated_tokens
            first, known = place.known, len(prompt) + len(generated)
            if known == first + 1 and known <= columns and generated:
                # A decode, in short.
                flat.append(place.row * columns + first)
                tokens.append(generated[-1])
                place.known = known
                continue
            end = min(known, columns)
            if end > first:
                flat.extend(range(place.row * columns + first, place.row * columns + end))
                tokens.extend(prompt[first:end])
                tokens.extend(generated[max(first - len(prompt), 0) : max(end - len(prompt), 0)])
                place.known = end
        rows = [place.row for place in places]
        first_row = rows[0]
        in_a_row = rows == list(range(first_row, first_row + len(rows)))
        self._taken = slice(first_row, first_row + len(rows)) if in_a_row else None, width
        return [] if in_a_row else rows, fresh, flat, tokens

    def take(self, rows: Tensor, fresh: Tensor, flat: Tensor, tokens: Tensor) -> Tensor:
        """The second half of `expected`. What it gives holds until the next `take`."""
        if fresh.shape[0]:
            self._tokens.index_fill_(0, fresh, UNKNOWN)
        if flat.shape[0]:
            # The lower half of each number, without a launch for it.
            self._tokens.view(-1).index_copy_(0, flat, tokens.view(torch.int32)[::2])
        in_a_row, width = self._taken
        if in_a_row is not None:
            return self._tokens[in_a_row, :width]
        return self._tokens[:, :width].index_select(0, rows)

    def _find(self, states: Sequence[Any]) -> list["_Place"]:
        """Each request's place; that of a request not seen before knows nothing."""
        last, places = self._last
        if len(last) == len(states) and all(map(is_, last, states)):
            # No other request was seen since.
            return places
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
        places = [self._places[state.request_id] for state in states]
        self._last = list(states), places
        return places

    def _fit(self, rows: int, width: int) -> int:
        """Makes room for ``rows`` requests of ``width`` tokens; gives the width there is."""
        have_rows, have_width = self._tokens.shape
        limit = max(self._budget_tokens // (2 * rows), 1)
        width = min(width, limit)
        if width > have_width or rows > have_rows:
            # Powers of two, so that growth is rare; everything is uploaded again after it.
            new_width = min(max(have_width, _power_of_two(width)), limit)
            new_rows = min(max(have_rows, _power_of_two(2 * rows)), max(self._budget_tokens // new_width, rows))
            self._tokens = torch.full((new_rows, new_width), UNKNOWN, dtype=torch.int32, device=self._device)
            self._places.clear()
            self._last = [], []
            # Rows of requests that come together follow each other: then a batch's are one part of the book.
            self._free = list(reversed(range(new_rows)))
        return width


class _Place:
    """A request's row, and how many of its tokens are there."""

    __slots__ = ("known", "row", "state")

    def __init__(self, row: int, state: Any) -> None:
        self.row = row
        self.state = state
        self.known = 0


def _power_of_two(least: int) -> int:
    return 1 << (max(least, 1) - 1).bit_length()
