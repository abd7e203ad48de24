"""`attention` in plain torch and float32: a second way to compute an engine's output; `explain` says whose it is."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from canary_core.attention import Attended, AttentionRule
from canary_core.watchers.recompute.noise import windows

_QUERIES = 512
"""Queries at a time: memory for one head's logits against all keys."""

_SCALES, _THIRDS = 2.0, 40
"""Another scale is sought within this factor, by so many steps, each to two thirds."""
_EXPLAINED = 50
"""A deviation explains an error that becomes so many times smaller."""


def attention(attended: Attended, rule: AttentionRule, rounding: float = 0.0) -> Tensor:
    """The output by ``rule``, float32 ``[n, heads, dim]``. rounding: each number of a query, each
    logit, each weight and the output is multiplied by a random one between ``1 - rounding`` and ``1 + rounding``."""
    draw = _Rounding(rounding, attended.queries.device)
    queries, keys, values = draw(attended.queries.float()), attended.keys.float(), attended.values.float()
    group = queries.shape[1] // keys.shape[1]
    out = torch.empty(*queries.shape[:2], values.shape[2], device=queries.device)
    key_at = torch.arange(len(keys), device=queries.device)
    for begin in range(0, len(queries), _QUERIES):
        part = slice(begin, begin + _QUERIES)
        at = attended.first + begin + torch.arange(len(queries[part]), device=queries.device)
        hidden = key_at[None] > at[:, None]
        if rule.window_tokens is not None:
            hidden |= key_at[None] <= at[:, None] - rule.window_tokens
        for head in range(queries.shape[1]):
            of = head // group
            logits = draw(queries[part, head] @ keys[:, of].T * rule.scale)
            if rule.soft_cap is not None:
                logits = rule.soft_cap * torch.tanh(logits / rule.soft_cap)
            logits.masked_fill_(hidden, -math.inf)
            if rule.sinks is not None:
                sink = rule.sinks[head].float().expand(len(logits), 1)
                weights = torch.cat((logits, sink), 1).softmax(1)[:, :-1]
            else:
                weights = logits.softmax(1)
            out[part, head] = draw(weights) @ values[:, of]
    return draw(out)


def errors(output: Tensor, right: Tensor) -> Tensor:
    """Relative L2 errors by head and token, float32 ``[heads, n]``: infinite where zeros should be."""
    apart = (output.float() - right).square().sum(2).T
    size = right.square().sum(2).T
    return torch.where(apart == 0, 0.0, (apart / size).sqrt()).nan_to_num(nan=torch.inf, posinf=torch.inf)


class _Rounding:
    """Multiplies by random numbers near 1, always the same ones."""

    def __init__(self, rounding: float, device: torch.device) -> None:
        self._rounding = rounding
        self._random = torch.Generator(device).manual_seed(0) if rounding else None

    def __call__(self, numbers: Tensor) -> Tensor:
        if self._random is None:
            return numbers
        random = torch.rand(numbers.shape, generator=self._random, device=numbers.device)
        return numbers * (1 + self._rounding * (2 * random - 1))


def explain(forwards: Sequence[Attended], rule: AttentionRule, head: int, bound: float) -> tuple[str, str] | None:
    """The simple deviation from ``rule`` by which the output of ``head`` is nearest to right, in the forward
    that is furthest off: its name, and a sentence's end. None if none is right within ``bound``,
    or nearly so."""
    apart, attended = max(
        ((_apart(*_one_head(one, rule, head, _kv_head(one, head))), one) for one in forwards), key=lambda pair: pair[0]
    )
    own = _kv_head(attended, head)
    if apart <= bound:
        return None
    seen, only = _one_head(attended, rule, head, own)
    scale = _nearest_scale(seen, only)
    tried = [(_apart(seen, changed), name, text) for name, text, changed in _deviations(only)]
    for other in {*range(attended.keys.shape[1])} - {own}:
        text = f"that of head {other} of the keys, and the head's own is {own}"
        tried.append((_apart(_one_head(attended, rule, head, other)[0], only), "head", text))
    if attended.keys.shape == attended.values.shape:
        exchanged = replace(seen, keys=seen.values, values=seen.keys)
        tried.append((_apart(exchanged, only), "values", "that of keys and values exchanged"))
    said = f"that of the scale {scale:.4g}, and the configuration says {rule.scale:.4g}"
    tried.append((_apart(seen, replace(only, scale=scale)), "scale", said))
    left, name, text = min(tried)
    return (name, text) if left <= max(bound, apart / _EXPLAINED) else None


def _deviations(rule: AttentionRule) -> Iterator[tuple[str, str, AttentionRule]]:
    """Name, text, and the rule then."""
    window = rule.window_tokens
    for other in (None, window - 1, window + 1) if window is not None else ():
        text = "that of no window" if other is None else f"that of a window of {other}"
        yield "window", f"{text}, and the configuration says {window}", replace(rule, window_tokens=other)
    if rule.soft_cap is not None:
        yield "soft_cap", "that of uncapped logits", replace(rule, soft_cap=None)
    if rule.sinks is not None:
        yield "sinks", "that of no sink", replace(rule, sinks=None)


def _kv_head(attended: Attended, head: int) -> int:
    return head // (attended.queries.shape[1] // attended.keys.shape[1])


def _one_head(attended: Attended, rule: AttentionRule, head: int, kv_head: int) -> tuple[Attended, AttentionRule]:
    only, of = slice(head, head + 1), slice(kv_head, kv_head + 1)
    seen = replace(
        attended, queries=attended.queries[:, only], output=attended.output[:, only], keys=attended.keys[:, of],
        values=attended.values[:, of],
    )  # fmt: skip
    return seen, replace(rule, sinks=None if rule.sinks is None else rule.sinks[only])


def _apart(attended: Attended, rule: AttentionRule) -> float:
    found = errors(attended.output, attention(attended, rule))
    _, medians = windows(found)
    return float(medians.max() if medians.numel() else found.median())


def _nearest_scale(attended: Attended, rule: AttentionRule) -> float:
    """By thirds."""
    low, high = -math.log(_SCALES), math.log(_SCALES)
    for _ in range(_THIRDS):
        third = (high - low) / 3
        left, right = (
            _apart(attended, replace(rule, scale=rule.scale * math.exp(at))) for at in (low + third, high - third)
        )
        low, high = (low, high - third) if left < right else (low + third, high)
    return rule.scale * math.exp((low + high) / 2)
