"""One wrong KV in a verified draft, once: by nothing but SGLang and torch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Change = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor, list[torch.Tensor]], bool]
"""Given the tensors of the pool, the slots of ``ill`` in the last verification and in this one, and what these held
before it: breaks the pool after the verification, or not yet. Whether it has."""


def kept_draft(tensors: list[torch.Tensor], last: torch.Tensor, slots: torch.Tensor, held: list[torch.Tensor]) -> bool:
    """Where the last draft of its position was rejected, its KV stays, and that of the right token is lost."""
    if not bool((last[1:] == slots[0]).any()):
        return False
    for tensor, rows in zip(tensors, held, strict=True):
        tensor[slots[0]] = rows[0]
    return True


def wrong_key(tensors: list[torch.Tensor], last: torch.Tensor, slots: torch.Tensor, held: list[torch.Tensor]) -> bool:
    """The key of the first token verified is wrong in layer 1."""
    tensors[1][slots[0]] = tensors[1][slots[0]].roll(1, -1)
    return True


@contextlib.contextmanager
def broken_once(engine: Any, change: Change) -> Iterator[list[int]]:
    """Until the end of the context ``change`` follows verifications of a request ``ill``, until it has done what it
    does. Gives the position of that token."""
    runner, pool = engine.runner, engine.runner.token_to_kv_pool
    tensors, at = [*pool.k_buffer, *pool.v_buffer], []
    last = torch.zeros(0, dtype=torch.int64)

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal last
        batch = args[0] if args else kwargs["forward_batch"]
        if not batch.forward_mode.is_target_verify() or "ill" not in batch.rids or at:
            return type(runner).forward(runner, *args, **kwargs)
        row = batch.rids.index("ill")
        slots = batch.out_cache_loc.reshape(len(batch.rids), -1)[row].clone()
        position = int(batch.seq_lens[row])
        held = [tensor[slots].clone() for tensor in tensors]
        done = type(runner).forward(runner, *args, **kwargs)
        with torch.inference_mode():
            if last.numel() and change(tensors, last, slots, held):
                at.append(position)
        last = slots
        return done

    runner.forward = forward
    try:
        yield at
    finally:
        del runner.forward
