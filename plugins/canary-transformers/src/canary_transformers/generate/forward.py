"""`ModelCall`: a model's arguments beside the cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNKNOWN = -1
"""Token given as an embedding, or before the guard began: never judged."""

PLAIN = frozenset(
    {
        "attention_mask", "cache", "cache_position", "input_ids", "labels", "logits_to_keep", "num_items_in_batch",
        "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values", "position_ids",
        "return_dict", "use_cache",
    }
)  # fmt: skip
"""Arguments of a forward from which, beside the weights, KV is computed, or that KV does not depend on."""


class Told(NamedTuple):
    """Arguments of `prepare_inputs_for_generation`: the sequences, integer ``[rows, n]``, and the mask of
    their tokens."""

    history: Tensor
    mask: Any


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """Input of a forward: ``rows`` times ``new`` tokens. ``tokens``: the ids, integer ``[rows, new]``, None for
    embeddings. ``history``: the sequences themselves, integer ``[rows, n]``, up to the forward's tokens, for a call by
    `generate()`. ``encoded``: the encoder's states beside, ``[rows, states, hidden]``. ``answer``: number of the
    `generate()` that calls, which gives the same states to all forwards of an answer; 0 for a direct call.

    For a second computation: ``mask``, ``[rows, n]`` from the first token on, None where all are visible.
    ``positions``: integer ``[rows, new]`` or ``[1, new]``; None where they follow from mask or cache. ``doubt``: why KV
    of this forward can't be computed again from tokens, None where it can.
    """

    rows: int
    new: int
    tokens: Tensor | None
    history: Tensor | None
    encoded: Tensor | None = None
    answer: int = 0
    mask: Tensor | None = None
    positions: Tensor | None = None
    doubt: str | None = None

    @classmethod
    def of(
        cls, model: Any, given: Mapping[str, Any], told: Told | None, answer: int, placed: bool
    ) -> "ModelCall | None":
        """From the arguments ``given`` to ``model``, None if neither tokens nor embeddings. ``placed``: the caller of
        `generate()` gave positions of its own."""
        for half in ("decoder_", ""):
            tokens, embeds = given.get(f"{half}input_ids"), given.get(f"{half}inputs_embeds")
            if isinstance(tokens, Tensor) and tokens.dim() >= 2:
                # Of several codebooks a position has a token each, which no record can hold.
                known = tokens if tokens.dim() == 2 else None
            elif isinstance(embeds, Tensor) and embeds.dim() == 3:
                tokens, known = embeds, None
            else:
                continue
            history, mask = (None, given.get("attention_mask")) if told is None else told
            positions = None if answer and told is not None and not placed else given.get("position_ids")
            doubt = _doubt(model, given, known, (mask, positions))
            if doubt is not None:
                mask = positions = None
            return cls(
                tokens.shape[0], tokens.shape[1], known, history, _encoded(given), answer, mask, positions, doubt
            )
        return None

    @property
    def answering(self) -> bool:
        """Whether `generate()` calls."""
        return self.answer > 0

    def history_to(self, end: int) -> Tensor | None:
        """The sequences' last tokens up to position ``end``; None where unknown, or longer."""
        history = self.history
        if history is None or history.dim() != 2 or history.shape[0] != self.rows:
            return None
        return history if 0 < history.shape[1] <= end else None

    def token_ids(self, device: torch.device, copied: bool = False) -> Tensor:
        """The tokens, row after row, int64. ``copied``: in memory of their own; the caller may write the next ones to
        its own."""
        if self.tokens is None:
            return torch.full((self.rows * self.new,), UNKNOWN, dtype=torch.int64, device=device)
        # One column of a longer tensor is a list with gaps.
        tokens = self.tokens.to(device, torch.int64).reshape(-1).contiguous()
        return tokens.clone() if copied else tokens

    def expected_tokens(self, prefix: int, unknown: int, device: torch.device) -> Tensor | None:
        """Expected token of every position up to the end, int64 ``[rows, prefix + new]``, if known; never for the first
        ``unknown``."""
        end = prefix + self.new
        history = self.history_to(end)
        if history is None:
            return None
        if history.shape[1] == end and not unknown and self.tokens is not None:
            return history.to(device, torch.int64)
        expected = torch.full((self.rows, end), UNKNOWN, dtype=torch.int64, device=device)
        expected[:, end - history.shape[1] :] = history.to(device)
        expected[:, :unknown] = UNKNOWN
        if self.tokens is None:
            expected[:, prefix:] = UNKNOWN
        return expected


def _doubt(model: Any, given: Mapping[str, Any], tokens: Tensor | None, two_dimensional: tuple[Any, Any]) -> str | None:
    """See `ModelCall.doubt`."""
    if tokens is None:
        return "tokens were given as embeddings, or several to a position"
    if not given.keys() <= PLAIN:
        other = [name for name in given.keys() - PLAIN if not isinstance(given[name], (bool, str, type(None)))]
        if other:
            return f"its KV depends on more than tokens: {', '.join(sorted(other))}"
    for name, value in zip(("attention_mask", "position_ids"), two_dimensional, strict=True):
        if value is not None and not (isinstance(value, Tensor) and value.dim() == 2):
            return f"a forward was given {name} of other than two dimensions"
    if model.training:
        return "a forward ran in training mode"
    if torch.is_autocast_enabled(tokens.device.type):
        return "a forward ran under autocast"
    return None


def _encoded(given: Mapping[str, Any]) -> Tensor | None:
    states = given.get("encoder_outputs")
    if isinstance(states, (tuple, Mapping)) and states:
        states = states[0]  # of an output of a model as of a tuple
    return states if isinstance(states, Tensor) and states.dim() == 3 else None
