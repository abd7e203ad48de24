"""`Given`: arguments of a cache's forwards beside tokens, for a second computation."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from canary_core import CanaryError, Touch
from canary_transformers.generate.forward import ModelCall

MOST_RUNS = 256
"""Tensors of given positions that are kept before one takes the place of all."""

Way = Literal["mask", "cache", "given"]
"""Whence positions come: from the mask, as in `generate()`; from the number of tokens in the cache; from the caller."""


class Span(NamedTuple):
    """Tokens of a row that a second computation is about: ``[first, end)``, all visible, the first at ``position``."""

    first: int
    end: int
    position: int


@dataclass(slots=True, eq=False)
class _Kept:
    """A tensor of the engine's, with the version of that time. inference: without versions, so a copy."""

    tensor: Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> "_Kept":
        if tensor.is_inference():
            return cls(tensor.clone(), None)
        return cls(tensor, tensor._version)

    @property
    def same(self) -> bool:
        return self.version is None or self.tensor._version == self.version


@dataclass(slots=True, eq=False)
class _Run:
    """Positions of ``count`` tokens in a row."""

    way: Way
    count: int
    positions: _Kept | None = None


class Given:
    """Follows the forwards of one cache, and the moves of its rows. Host only, but for masks of direct calls, of which
    each is compared with the one before on the device. doubt: why nothing of the cache can be computed again, None
    where it can. touch: the last tokens that came from another row, or an earlier answer. history: see `ModelCall`."""

    def __init__(self) -> None:
        self.doubt: str | None = None
        self.touch: Touch | None = None
        self.history: Tensor | None = None
        self._end = 0
        self._answer = -1
        self._mask: _Kept | None = None
        self._unlike: Tensor | None = None
        self._runs: list[_Run] = []

    def took(self, forward: ModelCall, end: int) -> None:
        """A forward has ended; the cache holds ``end`` tokens of a row."""
        if self.doubt is not None:
            return
        before, self._end = self._end, end
        if forward.doubt is not None:
            self.give_up(forward.doubt)
        elif before + forward.new != end:
            self.give_up("its cache held tokens before Canary followed it, or a forward left it alone")
        else:
            if not forward.answer or forward.answer != self._answer:
                self._begin(forward, before)
            elif forward.mask is not None:
                self._mask = _Kept(forward.mask, None) if forward.mask.is_inference() else _Kept.of(forward.mask)
            self._place(forward)
            self.history = forward.history

    def give_up(self, doubt: str) -> None:
        """Nothing is known from now on."""
        if self.doubt is None:
            self.doubt = doubt
        self._mask = self._unlike = self.history = None
        self._runs.clear()

    def cropped(self, end: int) -> None:
        """Only the first ``end`` tokens are left."""
        more = max(self._end - end, 0)
        self._end -= more
        self.history = None
        while more and self._runs:
            cut = min(more, self._runs[-1].count)
            self._runs[-1].count -= cut
            more -= cut
            if not self._runs[-1].count:
                self._runs.pop()

    def moved(self, rows: Tensor) -> None:
        """Row ``i`` is the former row ``rows[i]``."""
        if self.doubt is not None or not self._end:
            return
        if any(run.way == "given" for run in self._runs):
            self.give_up("rows changed places behind positions that were given")
            return
        self.touch, self.history = Touch("fork", self._end), None
        if self._mask is not None:
            self._mask = _Kept(self._mask.tensor[rows.to(self._mask.tensor.device)], None)
        if self._unlike is not None:
            self._unlike = self._unlike[rows.to(self._unlike.device)]

    def span(self, row: int, end: int) -> Span:
        """The part of a row's first ``end`` tokens that can be computed again. Waits for the device. Raises
        `CanaryError` with the reason where there is none."""
        if self.doubt is not None:
            raise CanaryError(self.doubt)
        if end != self._end:
            raise CanaryError("its cache was changed by something else than its methods")
        visible = self._visible(row, end)
        shown = visible.nonzero()[:, 0]
        if not len(shown):
            raise CanaryError("all of its tokens are masked")
        first, last = int(shown[0]), int(shown[-1]) + 1
        if not bool(visible[first:last].all()):
            raise CanaryError("tokens between others are masked")
        positions = self._positions(row, visible)[first:last]
        if not bool((positions.diff() == 1).all()):
            raise CanaryError("its positions do not count up by one")
        return Span(first, last, int(positions[0]))

    @property
    def counts_pads(self) -> bool:
        """Whether the model chose positions by itself, without the mask perhaps."""
        return any(run.way == "cache" for run in self._runs)

    def _begin(self, forward: ModelCall, before: int) -> None:
        """Another answer, or a direct call, behind ``before`` tokens."""
        if before and forward.answer:
            self.touch = Touch("hit", before)
        self._answer = forward.answer
        mask, known = forward.mask, self._mask
        if mask is not None and (mask.shape[0] != forward.rows or mask.shape[1] < before + forward.new):
            self.give_up("a forward was given an attention_mask of another size")
            return
        if before and not (mask is None and known is None):
            if known is not None and not known.same:
                self.give_up("its attention_mask was written to in place")
                return
            if known is None or mask is not known.tensor:
                self._compare(mask, known, before)
        self._mask = None if mask is None else _Kept.of(mask)

    def _compare(self, mask: Tensor | None, known: _Kept | None, before: int) -> None:
        """Notes rows whose first ``before`` tokens are visible to one forward only."""
        shown = [t[:, :before] != 0 for t in (mask, None if known is None else known.tensor) if t is not None]
        unlike = (shown[0] != shown[1] if len(shown) > 1 else ~shown[0]).any(1)
        self._unlike = unlike if self._unlike is None else self._unlike | unlike

    def _place(self, forward: ModelCall) -> None:
        """Whence the forward's positions come."""
        if forward.positions is not None:
            self._runs.append(_Run("given", forward.new, _Kept.of(forward.positions)))
            if len(self._runs) > MOST_RUNS:
                self._fold()
            return
        way: Way = "mask" if forward.answer and forward.history is not None else "cache"
        if self._runs and self._runs[-1].way == way:
            self._runs[-1].count += forward.new
        else:
            self._runs.append(_Run(way, forward.new))

    def _fold(self) -> None:
        """Positions of many forwards as one tensor."""
        given = [(run.positions, run.count) for run in self._runs if run.positions is not None]
        if len(given) < len(self._runs) or not all(one.same for one, _ in given):
            self.give_up("too many forwards were given position_ids, or these were written to in place")
            return
        rows = max(len(one.tensor) for one, _ in given)
        whole = torch.cat([one.tensor.expand(rows, -1)[:, :count] for one, count in given], 1)
        self._runs = [_Run("given", sum(run.count for run in self._runs), _Kept.of(whole))]

    def _visible(self, row: int, end: int) -> Tensor:
        """Mask of visible tokens, bool ``[end]`` on the host."""
        if self._unlike is not None and bool(self._unlike[row]):
            raise CanaryError("a token was visible to one forward, and masked for another")
        if self._mask is None:
            return torch.ones(end, dtype=torch.bool, device="cpu")
        if not self._mask.same:
            raise CanaryError("its attention_mask was written to in place")
        return self._mask.tensor[row, :end].to("cpu") != 0

    def _positions(self, row: int, visible: Tensor) -> Tensor:
        """Of each token, int64, on the host."""
        by_mask, by_cache = visible.long().cumsum(0) - 1, torch.arange(len(visible), device="cpu")
        parts, first = [], 0
        for run in self._runs:
            part = slice(first, first + run.count)
            if run.positions is not None:
                if not run.positions.same:
                    raise CanaryError("its position_ids were written to in place")
                given = run.positions.tensor
                parts.append(given[row if len(given) > 1 else 0, : run.count].to("cpu", torch.int64))
            else:
                parts.append((by_mask if run.way == "mask" else by_cache)[part])
            first += run.count
        return torch.cat(parts)
