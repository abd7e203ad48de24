"""`TokenOracle`: right answers of an engine, without a right run to compare with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from canary_core.ops.hashing import mix

LOWEST = 3
"""Smaller tokens are special ones in most vocabularies."""


class TokenOracle:
    """A model whose next token is a hash of all tokens so far, in the place of an engine's own: so the answer to any
    prompt is known, and an engine that reads another slot, computes another token or mixes requests up answers wrongly.

    Keeps the token of each slot, as an engine's KV does, and reads a sequence through the engine's table, as attention
    does. A test calls `store` with a forward's writes, and puts `speak` between the forward and the engine's sampler,
    which must be greedy.

    slots: the number in the engine's pool. vocabulary: answers are tokens from `LOWEST` to below.
    """

    def __init__(self, slots: int, vocabulary: int) -> None:
        self._stored = torch.zeros(slots, dtype=torch.int64)
        self._vocabulary = vocabulary

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """A forward wrote ``tokens`` to ``slots``; integer ``[n]``."""
        self._stored[slots.long().cpu()] = tokens.long().cpu()

    def read(self, slots: Tensor) -> Tensor:
        """The tokens of a sequence in ``slots``, int64 ``[n]``."""
        return self._stored[slots.long().cpu()]

    def after(self, tokens: Sequence[int] | Tensor) -> int:
        """The token after ``tokens``."""
        sequence = torch.as_tensor(tokens, dtype=torch.int64)
        prefix = mix(sequence, torch.arange(len(sequence))).sum()
        # The sum of all mixes is the sequence's prefix hash: its high bits depend on every token and its place.
        return LOWEST + int((prefix >> 17) % (self._vocabulary - LOWEST))

    def answer(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """The right answer to ``prompt``."""
        tokens = list(prompt)
        for _ in range(new_tokens):
            tokens.append(self.after(tokens))
        return tokens[len(prompt) :]

    def speak(self, logits: Tensor, sequences: Sequence[Sequence[int] | Tensor]) -> None:
        """Changes ``logits``, ``[sequences, vocabulary]``, so that a greedy sampler returns the right next token of
        each of ``sequences``."""
        right = torch.tensor([self.after(tokens) for tokens in sequences], device=logits.device)
        logits.zero_().scatter_(1, right[:, None], 1.0)
