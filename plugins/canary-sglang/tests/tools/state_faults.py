"""Recurrent states of a request ``ill`` that SGLang or its pool gets wrong: by nothing but SGLang and torch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def another_state(engine: Any, slot: int) -> Iterator[None]:
    """Where ``ill`` hits a cached prefix, it goes on from the state in ``slot`` instead of the prefix's own."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    collect = ScheduleBatch._collect_deferred_mamba_cow_and_clear

    def wrong(batch: Any, requests: list[Any]) -> None:
        for one in requests:
            if one.rid == "ill" and one.kv.mamba_cow_src_index is not None:
                one.kv.mamba_cow_src_index = torch.full_like(one.kv.mamba_cow_src_index, slot)
        collect(batch, requests)

    ScheduleBatch._collect_deferred_mamba_cow_and_clear = wrong
    try:
        yield
    finally:
        ScheduleBatch._collect_deferred_mamba_cow_and_clear = collect


@contextlib.contextmanager
def lost_updates(engine: Any) -> Iterator[None]:
    """Decodes of ``ill`` leave its states as they were."""
    runner = engine.runner

    def forward(*args: Any, **kwargs: Any) -> Any:
        batch = args[0] if args else kwargs["forward_batch"]
        if "ill" not in batch.rids or not batch.forward_mode.is_decode():
            return type(runner).forward(runner, *args, **kwargs)
        slot = state_of(engine, "ill")
        held = [states[:, slot].clone() for states in tensors(engine)]
        done = type(runner).forward(runner, *args, **kwargs)
        for states, before in zip(tensors(engine), held, strict=True):
            states[:, slot] = before
        return done

    runner.forward = forward
    try:
        yield
    finally:
        del runner.forward


def exchange(engine: Any, one: int, other: int) -> None:
    """The states in two slots."""
    with torch.inference_mode():
        for states in tensors(engine):
            states[:, [one, other]] = states[:, [other, one]]


def state_of(engine: Any, name: str) -> int:
    """The slot of a running request's states."""
    request = next(one for one in reversed(engine.requests) if one.rid == name)
    return int(request.kv.mamba_pool_idx)


def cached(engine: Any, serve: Callable[[], object]) -> int:
    """Serves, and gives the slot of the last state that the prefix cache has got by that."""
    held = engine.scheduler.tree_cache.all_mamba_values_flatten
    before = set(held().tolist())
    serve()
    return max(set(held().tolist()) - before)


def tensors(engine: Any) -> list[torch.Tensor]:
    """Of all states: ``[layers, slots, ...]``."""
    pool = engine.runner.req_to_token_pool.mamba_pool.mamba_cache
    return [one for one in (*pool.conv, pool.temporal) if one.numel()]
