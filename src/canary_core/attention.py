"""Interface for plugin authors: `AttentionRule` and `Attended`, one layer's attention by the configuration and as an
engine has computed it."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """Causal attention of one layer, by the model's configuration: ``softmax(cap(scale * q k))`` times V over the
    visible keys.

    scale: factor of the products. window_tokens: number of visible keys, the query's own among them. soft_cap: logits
    are ``soft_cap * tanh(logits / soft_cap)``. sinks: ``[heads]``, a logit of each head to which no value belongs.
    """

    scale: float
    window_tokens: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """Attention of one layer in one forward of one sequence, heads of queries in groups of equal size by head of keys.

    first: position of the first of ``n`` queries. queries: ``[n, heads, dim]``. keys, values: ``[first + n, kv_heads,
    dim]``, as attention was given them. output: ``[n, heads, dim]``. computed, computed_keys: ``[n, kv_heads, dim]``,
    the last values and keys as the layer has computed them, before anything has stored them; None where nobody knows.
    compressed: where keys and values are computed from compressed KV, its last ``n`` rows, ``[n, dim]``, as the cache
    holds them, and as the layer has computed them.
    """

    layer: int
    first: int
    queries: Tensor = field(repr=False)
    keys: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    output: Tensor = field(repr=False)
    computed: Tensor | None = field(default=None, repr=False)
    computed_keys: Tensor | None = field(default=None, repr=False)
    compressed: tuple[Tensor, Tensor] | None = field(default=None, repr=False)


class AttentionObserver(Protocol):
    """Looks at the attention of one ``layer`` while a recompute runs."""

    layer: int

    def see(self, attended: Attended) -> None:
        """Called for each forward, with tensors as they are then."""
