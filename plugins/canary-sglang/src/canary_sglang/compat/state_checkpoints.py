"""Checkpoints of recurrent states that forwards take of their own accord (``extra_buffer``)."""

import importlib
from typing import Any

import torch
from torch import Tensor

from canary_core import PluginError, StateCheckpoints

CONTEXT = "sglang.srt.runtime_context"

NO_SLOT = -1
"""In place of a slot: the row takes no checkpoint."""


class Checkpoints:
    """Which states the forwards of one runner put aside, and as of which tokens.

    An extend does so for requests that have a whole chunk to compute, as of the last whole chunk's end, or where the
    cache's sequences branch; a decode where a sequence's length is a multiple of an interval. The scheduler decides.

    ``chunk_tokens``: of a chunk. ``interval_tokens``: a number that divides the lengths at which decodes do so, 0 if
    none is known.
    """

    def __init__(self, chunk_tokens: int, interval_tokens: int) -> None:
        self._chunk = chunk_tokens
        self._interval = interval_tokens

    @classmethod
    def of(cls, runner: Any) -> "Checkpoints | None":
        """Those of one `ModelRunner`; None where its forwards put no states aside. Raises `PluginError` where this
        SGLang doesn't say how long a chunk is."""
        if not getattr(runner.req_to_token_pool, "enable_mamba_extra_buffer", False):
            return None
        return cls(_chunk_tokens(runner.server_args), _interval_tokens(runner.server_args))

    def of_forward(self, batch: Any, prefix_lens: Tensor) -> StateCheckpoints | None:
        """What a decode or an extend puts aside; None for nothing. ``prefix_lens``: tokens that its states have before
        it."""
        slots, mask = batch.mamba_track_indices, batch.mamba_track_mask
        if slots is None or mask is None or not len(slots):
            return None
        prefix = prefix_lens.long()
        if batch.forward_mode.name == "DECODE":
            if self._is_between(batch.seq_lens_cpu):
                return None
            positions = prefix
        else:
            ends = batch.mamba_track_seqlens
            if ends is None or self._is_short(batch.extend_seq_lens_cpu):
                return None
            # As SGLang's kernels have it: the end is given a token too high where it is not that of the extend.
            positions = prefix + (ends.long() - prefix) // self._chunk * self._chunk - 1
        return StateCheckpoints(torch.where(mask, slots.long(), NO_SLOT), positions)

    def _is_between(self, lengths: Any) -> bool:
        """Whether none of these sequences, as long as the host knows them to be, can be due."""
        return bool(self._interval) and lengths is not None and bool((lengths % self._interval != 0).all())

    def _is_short(self, new_lens: Any) -> bool:
        """Whether no request of an extend has a whole chunk."""
        return new_lens is not None and max(new_lens, default=0) < self._chunk


def tracked_slots(batch: Any) -> Tensor | None:
    """Slots to which a forward, or what comes after it, may write checkpoints; None for none."""
    slots, mask = batch.mamba_track_indices, batch.mamba_track_mask
    return slots if slots is None or mask is None else torch.where(mask, slots, NO_SLOT)


def _chunk_tokens(server_args: Any) -> int:
    """Tokens between two places where an extend can put a state aside: a function, up to 0.5.17 a property."""
    said = getattr(importlib.import_module(CONTEXT), "mamba_cache_chunk_size", None)
    tokens = said() if said is not None else getattr(server_args, "mamba_cache_chunk_size", None)
    if not tokens:
        raise PluginError(f"{CONTEXT}.mamba_cache_chunk_size is missing; checkpoints of states can't be followed")
    return int(tokens)


def _interval_tokens(server_args: Any) -> int:
    """How many tokens apart decodes may put a state aside: the real distance is a multiple of it. 0 if not known."""
    context = importlib.import_module(CONTEXT)
    said = context.get_exec().mamba if hasattr(context, "get_exec") else server_args
    return int(getattr(said, "mamba_track_interval", 0) or 0)
