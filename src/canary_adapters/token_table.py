"""The requests' own tokens as `BatchView.expected_tokens`."""

from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias, Union

import torch
from torch import Tensor

from canary_core.batch import EXPECTED_STEP, MOST_EXPECTED

UNKNOWN = -1
TABLE_STEP = EXPECTED_STEP
"""The width of a table of tokens is a multiple."""
MOST_TOKENS = MOST_EXPECTED
"""Most entries of one table; further positions are not compared, and the forward counts as ``tokens_beyond_bound``."""


Tokens: TypeAlias = Union[Tensor, "array[int]"]
"""A request's tokens from position 0 on, ``[n]`` on the host."""


def token_table(requests: Sequence[Tokens | None], longest: int, device: torch.device) -> Tensor:
    """Tokens by position, int32 ``[rows, width]`` on ``device``, as far as ``longest`` at least; -1 where they are not
    known. ``requests``: the tokens of each row, None where none are known. The host does not wait."""
    table = unknown_tokens(len(requests), longest, device)
    for row, tokens in zip(table.numpy(), requests, strict=True):
        if tokens is not None:
            known = min(len(tokens), len(row))
            row[:known] = (tokens.numpy() if isinstance(tokens, Tensor) else memoryview(tokens))[:known]
    return table.to(device, non_blocking=True) if device.type != "cpu" else table


def unknown_tokens(rows: int, longest: int, device: torch.device) -> Tensor:
    """The table of `token_table` while nothing is known: -1, int32 ``[rows, width]``, on the host, in memory whose copy
    to ``device`` makes nobody wait. For adapters without tensors of tokens: fill the rows by position through
    `Tensor.numpy`, whose views cost a fifth of torch's, and copy the table with ``to(device, non_blocking=True)``."""
    width = -(-min(longest, MOST_TOKENS // rows) // TABLE_STEP) * TABLE_STEP
    return torch.full((rows, width), UNKNOWN, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")


class Prompts:
    """The prompts of an engine's requests, by name, as expected tokens of the forwards that compute them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._prompts: dict[str, Tokens] = {}
        # Those whose prompt may not be computed whole yet.
        self._open: set[str] = set()

    def give(self, request: str, tokens: Tokens) -> None:
        """Sets the prompt of ``request``, about to begin."""
        self._prompts[request] = tokens
        self._open.add(request)

    def again(self, request: str) -> None:
        """The prompt of ``request`` is computed anew, as after a preemption."""
        if request in self._prompts:
            self._open.add(request)

    def drop(self, request: str) -> None:
        """The request is over."""
        self._prompts.pop(request, None)
        self._open.discard(request)

    def table(
        self, requests: Sequence[str], computed: Callable[[], Sequence[int]], new: Sequence[int]
    ) -> Tensor | None:
        """`token_table` for the ``requests`` in their prompt. ``computed``, ``new``: each one's tokens before the
        forward, and its new ones; the host's figures, possibly too high. None without a request in its prompt, as in
        decode, at next to no cost."""
        if self._open.isdisjoint(requests):
            return None
        known: list[Tokens | None] = []
        longest = 0
        # In one pass: the engine waits for its host where a request begins.
        for name, count, more in zip(requests, computed(), new, strict=True):
            prompt = self._prompts.get(name)
            if prompt is None or count >= len(prompt):
                self._open.discard(name)
                known.append(None)
                continue
            known.append(prompt)
            if count + more > longest:
                longest = count + more
        return token_table(known, int(longest), self._device) if longest else None
