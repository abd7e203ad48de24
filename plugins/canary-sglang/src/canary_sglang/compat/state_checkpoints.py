"""Checkpoints of recurrent states: with ``extra_buffer``, forwards copy states into checkpoint slots."""

import importlib
from typing import Any

import torch
from torch import Tensor

from canary_core import PluginError, StateCheckpoints

CONTEXT = "sglang.srt.runtime_context"

NO_SLOT = -1
"""Stands for a slot in rows without a checkpoint."""


class Checkpoints:
    """States copied by one runner's forwards into checkpoint slots, and the token after which each is taken.

    The scheduler chooses the requests. An extend copies the state at the end of its last whole chunk, or at the token
    where sequences in the cache branch. A decode copies the state where a sequence's length is a multiple of an
    interval.

    ``chunk_tokens``: length of a chunk. ``interval_tokens``: a divisor of all lengths at which decodes copy, 0 if
    unknown.
    """

    def __init__(self, chunk_tokens: int, interval_tokens: int) -> None:
        self._chunk = chunk_tokens
        self._interval = interval_tokens

    @classmethod
    def of(cls, runner: Any) -> "Checkpoints | None":
        """The checkpoints of one `ModelRunner`; None if its forwards make none. Raises `PluginError` if the installed
        SGLang does not give the length of a chunk."""
        if not getattr(runner.req_to_token_pool, "enable_mamba_extra_buffer", False):
            return None
        return cls(_chunk_tokens(runner.server_args), _interval_tokens(runner.server_args))

    def of_forward(self, batch: Any, prefix_lens: Tensor) -> StateCheckpoints | None:
        """The checkpoints made by a decode or an extend; None without any. ``prefix_lens``, ``[rows]``: tokens before
        the forward."""
        slots, mask = batch.mamba_track_indices, batch.mamba_track_mask
        if slots is None or mask is None or not len(slots):
            return None
        prefix = prefix_lens.long()
        decodes = batch.forward_mode.name == "DECODE"
        if decodes:
            if self._is_between(batch.seq_lens_cpu):
                return None
            positions = prefix
        else:
            ends = batch.mamba_track_seqlens
            if ends is None or self._is_short(batch.extend_seq_lens_cpu):
                return None
            # As in SGLang's kernels: an end within the extend is given one token too high.
            positions = prefix + (ends.long() - prefix) // self._chunk * self._chunk - 1
        # A decode copies the state that it has just written; an extend may take it out of the kernel that computes it.
        return StateCheckpoints(torch.where(mask, slots.long(), NO_SLOT), positions, copied=decodes)

    def _is_between(self, lengths: Any) -> bool:
        """Whether none of these sequences can have a checkpoint now. ``lengths``: on the host, None if unknown."""
        return bool(self._interval) and lengths is not None and bool((lengths % self._interval != 0).all())

    def _is_short(self, new_lens: Any) -> bool:
        """Whether no request of an extend has a whole chunk."""
        return new_lens is not None and max(new_lens, default=0) < self._chunk


def tracked_slots(batch: Any) -> Tensor | None:
    """Slots into which SGLang may copy states during or after a forward, `NO_SLOT` in rows without; None if there are
    none."""
    slots, mask = batch.mamba_track_indices, batch.mamba_track_mask
    return slots if slots is None or mask is None else torch.where(mask, slots, NO_SLOT)


def _chunk_tokens(server_args: Any) -> int:
    """Tokens of a chunk, from a function of SGLang, up to 0.5.17 from a property of `ServerArgs`."""
    said = getattr(importlib.import_module(CONTEXT), "mamba_cache_chunk_size", None)
    tokens = said() if said is not None else getattr(server_args, "mamba_cache_chunk_size", None)
    if not tokens:
        raise PluginError(f"{CONTEXT}.mamba_cache_chunk_size is missing; checkpoints of states can't be followed")
    return int(tokens)


def _interval_tokens(server_args: Any) -> int:
    """Tokens between two checkpoints of decodes, or a divisor; 0 if unknown."""
    context = importlib.import_module(CONTEXT)
    said = context.get_exec().mamba if hasattr(context, "get_exec") else server_args
    return int(getattr(said, "mamba_track_interval", 0) or 0)
