"""`AttentionCalls`: how an engine's layers compute attention; `Operands`: tensors of one call."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canary_adapters.attention_rules import AttentionLayer
from canary_adapters.compressed_kv import Expanded


def _no_scales(number: int) -> str:
    return "nobody knows its scales"


class Operands(NamedTuple):
    """Of one call of a layer's attention, ``[tokens, heads, dim]`` each. output: memory of the output, unless the call
    gives the output. expanded: where the pool has compressed KV instead of ``keys`` and ``values``, all of these as
    computed by the layer; such a call has no token of an earlier forward."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor | None = None
    expanded: Expanded | None = None


def _none(*given: Any, **more: Any) -> None:
    return None


def _nothing_more(number: int) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """How an engine's layers compute attention. layers: by number; asked for once. method: the owners' method.
    operands: the fields of `Operands`, of a layer's number and a call's arguments; None for another layer of the same
    owner, or the reason against a look. scales: the factors by which attention of a layer, by number, reads keys and
    values stored in fp8; or the reason for which it can't be computed from these alone. around: entered while a layer
    is watched."""

    layers: Callable[[], Mapping[int, AttentionLayer]] = dict
    method: str = ""
    operands: Callable[..., Sequence[Any] | str | None] = _none
    scales: Callable[[int], tuple[float, float] | str] = _no_scales
    around: Callable[[int], AbstractContextManager[None]] = _nothing_more


def unabsorbed(
    layers: Callable[[], Mapping[int, AttentionLayer]], number: int, *given: Any, output: Tensor, **more: Any
) -> Operands:
    """Of a call of a layer of MLA that projects compressed KV by itself, or takes queries to the rows instead.
    ``given``: queries by head, compressed KV, the rotated part of keys, and more. ``layers``: as of `AttentionCalls`,
    with ``kv_b_proj``."""
    queries, plain, rotated, *_ = given
    heads, rotated = queries.shape[1], rotated.reshape(len(rotated), 1, -1)
    made = layers()[number].owner.kv_b_proj(plain)[0].view(len(plain), heads, -1)
    dim = queries.shape[2] - rotated.shape[2]
    keys, values = torch.cat((made[..., :dim], rotated.expand(-1, heads, -1)), -1), made[..., dim:]
    rows = torch.cat((plain, rotated[:, 0]), -1)
    return Operands(queries, keys, values, output, Expanded(rows, keys, values))
