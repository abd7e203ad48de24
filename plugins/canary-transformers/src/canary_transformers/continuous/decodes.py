"""`Decodes`: decodes of the same requests, known to the host beforehand except for the tokens."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import add, attrgetter
from typing import Any

from torch import Tensor

from canary_core import BatchView
from canary_transformers.continuous.compat import KVGroup
from canary_transformers.continuous.staging import Staging

END = attrgetter("position_offset")
ENDLESS = 1 << 62
"""More steps than there are."""


class Decodes:
    """State carried from one decode to the next while the requests stay the same: lengths grow by one, the lists read
    by attention by as many slots, and the engine's tensors stay in place. So the view stays, too, and only numbers in
    it change.

    groups: of the cache. arguments: of the first forward, a decode. past: each request's tokens before. starts: place
    of each row's position 0 in the list of each group. places: place in a `TokenBook` of the token after the forward's.

    prefix_lens, places, tokens, starts: on the device, of the last `go_on`.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        arguments: Mapping[str, Any],
        past: Sequence[int],
        starts: Sequence[Sequence[int]],
        places: Sequence[int],
    ) -> None:
        rows = len(past)
        self._staging = Staging(3 + len(groups), rows, arguments["input_ids"].device)
        self._blocks = arguments.get("block_table") is not None
        self.prefix_lens, self.places, self.tokens, *self.starts = self._staging.tensors
        self.end = max(past) + 2
        """How many tokens the longest request has after the next decode."""
        self.views: dict[int, tuple[list[int], BatchView]] = {}
        """By place of the engine's tokens: places of all the view's tensors of the engine, and the view."""
        self._indices = [group.index for group in groups]
        self._new = [1] * rows
        self._past = list(past)
        # What comes next in the book.
        self._places = [place - 1 for place in places]
        self._ends = [count + 2 for count in past]
        self._left = ENDLESS
        self._starts = [list(first) for first in starts]
        self._moves: list[list[int]] = []
        self._listed: list[int] = []
        self._longer: list[int] = []
        for group in groups:
            window = group.window_tokens
            # In a window that is full a token is passed for each that comes.
            grows = [window is None or count < window - 1 for count in past]
            listed = [count + 1 if window is None else min(count, window - 1) + 1 for count in past]
            before = accumulate(grows[:-1], initial=0)
            self._moves.append([more - (not grow) for more, grow in zip(before, grows, strict=True)])
            self._listed.append(sum(listed))
            self._longer.append(sum(grows))
            if window is not None:
                room = [window - 1 - count for count, grow in zip(past, grows, strict=True) if grow]
                self._left = min([self._left, *room])

    def follows(self, states: Sequence[Any], new: Sequence[int], arguments: Mapping[str, Any]) -> bool:
        """Whether a forward with ``arguments`` of ``states``, the requests of the forward before, with ``new`` tokens
        each, is the next decode."""
        blocks = arguments.get("block_table") is not None
        if new != self._new or not self._left or blocks != self._blocks:
            return False
        if not blocks:
            lists = arguments["read_index"]
            for index, listed, longer in zip(self._indices, self._listed, self._longer, strict=True):
                # What would be read lies beyond it.
                if lists[index].shape[0] < listed + longer:
                    return False
        return list(map(END, states)) == self._ends

    def go_on(self, tokens: Sequence[int]) -> None:
        """The next decode's ``tokens``; sends its numbers, in one copy on the current stream."""
        self._past = [count + 1 for count in self._past]
        self._places = [place + 1 for place in self._places]
        self._starts = [list(map(add, first, moves)) for first, moves in zip(self._starts, self._moves, strict=True)]
        self._staging.send([self._past, self._places, tokens, *self._starts])
        self._ends = [end + 1 for end in self._ends]
        self._listed = list(map(add, self._listed, self._longer))
        self._left -= 1
        self.end += 1

    def of_engine(self, arguments: Mapping[str, Any]) -> list[int]:
        """Places of all tensors of the engine in a view, except the tokens."""
        found = [arguments["input_ids"].shape[1], arguments["position_ids"].data_ptr()]
        blocks: Tensor | None = arguments.get("block_table")
        if blocks is not None:
            return [*found, blocks.data_ptr(), *blocks.shape]
        for index in self._indices:
            write = arguments["write_index"][index]
            found += (arguments["read_index"][index].data_ptr(), write.data_ptr(), write.shape[0])
        return found
