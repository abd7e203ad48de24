"""`AttentionLook`: one layer's attention, computed once more in plain torch while a recompute runs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.attention import Attended, AttentionRule
from canary_core.runtime.host_copy import HostCopy
from canary_core.watchers.recompute.noise import MARGIN, WINDOW_TOKENS, windows
from canary_core.watchers.recompute.reference import attention, errors, explain


@dataclass(frozen=True, slots=True)
class AttentionError:
    """Relative L2 errors of one layer's attention against `AttentionRule`, in the head that is furthest off. median: of
    all tokens; worst: the largest median of `WINDOW_TOKENS` tokens in a row; bound: the largest such median that counts
    as rounding. deviation: by which the output is explained, see `canary_core.kinds.attention`; None if nothing is
    wrong."""

    layer: int
    head: int
    tokens: int
    median: float
    worst: float
    bound: float
    deviation: str | None = None
    detail: str | None = None
    position: int | None = None

    @property
    def differs(self) -> bool:
        """Whether the layer computes something else than the configuration says."""
        return self.deviation is not None


TF32_ROUNDING = 2.0**-11
"""Unit roundoff of TensorFloat-32, by which a GPU may compute products of 32-bit floats."""


_UNLIKE = (
    ("values", "attention was given other values than the layer has computed"),
    ("keys", "attention was given other keys than the layer has computed"),
    ("keys", "the cache holds other compressed KV than the layer has computed"),
)
"""Deviation, and a sentence's end, by mask of `AttentionLook`."""


class AttentionLook:
    """An `AttentionObserver`. The bound is learnt from the very numbers: the reference with random roundings.

    rounding: the unit roundoff of the layer's numbers. doubt: why there is no verdict, None if there may be one.
    """

    def __init__(self, layer: int, rule: AttentionRule, rounding: float) -> None:
        self.layer = layer
        self.doubt: str | None = None
        self._rule = rule
        self._rounding = rounding
        self._first = self._end = 0
        self._seen: list[tuple[Tensor, ...]] = []
        """For each forward: errors, errors by roundings, and masks of tokens: those of `_UNLIKE`, not finite."""
        self._kept: list[Attended] = []
        self._copy: HostCopy | None = None

    def see(self, attended: Attended) -> None:
        """Computes it again. On the device; never waits."""
        count, heads = attended.queries.shape[:2]
        keys, kv_heads = attended.keys.shape[:2]
        if keys != attended.first + count or heads % kv_heads:
            self.doubt = f"attention got {keys} keys at position {attended.first + count}, {kv_heads} heads of {heads}"
        elif self._seen and attended.first != self._end:
            self.doubt = f"attention went on at position {attended.first}, behind {self._end}"
        if self.doubt is not None:
            return
        if not self._seen:
            self._first = attended.first
        self._end = keys
        rounding = max(self._rounding, _products(attended.queries, keys))
        right = attention(attended, self._rule)
        rounded = errors(attention(attended, self._rule, rounding), right)
        unlike = (
            _unlike(attended.values[attended.first :], attended.computed),
            _unlike(attended.keys[attended.first :], attended.computed_keys),
            _unlike(*(attended.compressed or (attended.queries, None))),
        )
        self._seen.append((errors(attended.output, right), rounded, *unlike, ~right.isfinite().flatten(1).all(1)))
        # The first one, and the last one of many tokens: more would take much memory.
        if len(self._kept) > 1 and count >= WINDOW_TOKENS:
            del self._kept[1]
        if len(self._kept) < 2:
            self._kept.append(attended)

    def arrived(self) -> bool:
        """Whether `result` does not wait, once all was seen. Never waits."""
        if self._copy is None and self._seen:
            # On the device, each has its tokens in the last dimension.
            self._copy = HostCopy(*(torch.cat(parts, -1) for parts in zip(*self._seen, strict=True)))
        return self._copy is None or self._copy.arrived()

    def result(self) -> AttentionError | None:
        """The verdict on all that was seen; None where there is none, and `doubt` says why. Waits for the device,
        unless all has `arrived`."""
        if self.doubt is None and self._end - self._first < WINDOW_TOKENS:
            self.doubt = f"fewer than {WINDOW_TOKENS} tokens were seen by its attention"
        if self.doubt is None and not self.arrived() and self._copy is not None:
            self._copy.wait()
        if self.doubt is not None or self._copy is None:
            return None
        found, rounded, *unlike, infinite = self._copy.tensors
        if bool(infinite.any()):
            self.doubt = "its numbers are not finite"
            return None
        starts, medians = windows(found)
        _, noise = windows(rounded)
        bounds = MARGIN * noise.max(1).values
        head = int((medians.max(1).values / bounds).argmax())
        bound, worst = float(bounds[head]), float(medians[head].max())
        known = self.layer, head, found.shape[1], float(found[head].median()), worst, bound
        for (name, detail), mask in zip(_UNLIKE, unlike, strict=True):
            if bool(mask.any()):
                return AttentionError(*known, name, detail, self._first + int(mask.nonzero()[0]))
        if not worst > bound:
            return AttentionError(*known)
        over = starts[int((medians[head] > bound).nonzero()[0])]
        position = self._first + over + int((found[head, over : over + WINDOW_TOKENS] > bound).nonzero()[0])
        size = (
            f"head {head} is off by {worst:.2g} in the median of {WINDOW_TOKENS} tokens, where rounding is {bound:.2g}"
        )
        named = explain(self._kept, self._rule, head, bound)
        if named is None:
            return AttentionError(*known, "unknown", size, position)
        return AttentionError(*known, named[0], f"{size}; it is {named[1]}", position)


def _unlike(given: Tensor, computed: Tensor | None) -> Tensor:
    """Mask of tokens, none of which differs where nobody knows what was computed."""
    if computed is None:
        return torch.zeros(len(given), dtype=torch.bool, device=given.device)
    return (given != computed).flatten(1).any(1)


def _products(queries: Tensor, keys: int) -> float:
    """Roundoff of products of 32-bit floats and of their sums over a head's numbers, or over so many keys, as the
    settings of the process allow for the device."""
    exact = torch.finfo(torch.float32).eps / 2 * math.sqrt(max(queries.shape[2], keys))
    try:
        return exact if not queries.is_cuda or torch.get_float32_matmul_precision() == "highest" else TF32_ROUNDING
    except RuntimeError:  # both of torch's ways to set the precision were used
        return TF32_ROUNDING
