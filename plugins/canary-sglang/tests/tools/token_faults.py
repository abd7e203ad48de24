"""Bugs between the sampler and the next forward, made in SGLang's own buffers and lengths."""

from typing import Any

import torch

from tools.traffic import decoding


def mix_up(engine: Any, what: str, prompts: list[list[int]], new_tokens: int = 12, turns: int = 3) -> dict[str, Any]:
    """Serves ``prompts``, makes the bug ``what`` once while all of them decode, and goes on for some ``turns``. Gives
    whom it concerns and what the sampler had given those: name → position and token."""
    requests = decoding(engine, prompts, new_tokens)
    concerned = BUGS[what](engine, requests)
    for _ in range(turns):
        engine.step()
    told = {request.rid: told for request, *told in concerned}
    for request in requests:
        engine.abort(request.rid)
    while engine.scheduler.running_batch.reqs:
        engine.step()
    return told


def _exchange(engine: Any, requests: list[Any]) -> list[tuple[Any, int, int]]:
    """The next tokens of two requests change places where they wait for the next forward."""
    tokens = engine.scheduler.future_map.output_tokens_buf
    pairs = [(a, b) for a in requests for b in requests if tokens[_row(a)] != tokens[_row(b)]]
    concerned = [(request, _length(request), int(tokens[_row(request)])) for request in pairs[0]]
    places = torch.tensor([_row(request) for request in pairs[0]])
    tokens[places] = tokens[places.flip(0)]
    return concerned


def _grow(engine: Any, requests: list[Any]) -> list[tuple[Any, int, int]]:
    """A sequence length is one too large after a verification: the first rejected draft is kept."""
    return _lengthen(engine, requests, 1)


def _shrink(engine: Any, requests: list[Any]) -> list[tuple[Any, int, int]]:
    """A sequence length is one too small after a verification, or after a decode."""
    return _lengthen(engine, requests, -1)


def _lengthen(engine: Any, requests: list[Any], by: int) -> list[tuple[Any, int, int]]:
    batch = engine.scheduler.running_batch
    request = batch.reqs[0]
    position, token = _length(request), int(request.output_ids[-1])
    batch.seq_lens = batch.seq_lens.clone()
    batch.seq_lens[0] += by
    batch.seq_lens_cpu = batch.seq_lens.cpu()
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    return [(request, position, token)]


BUGS = {"exchanged": _exchange, "kept_draft": _grow, "short": _shrink}


def _length(request: Any) -> int:
    """The position of the token that a request was given last: all before it are in the cache."""
    return len(request.origin_input_ids) + len(request.output_ids) - 1


def _row(request: Any) -> int:
    holder = request if hasattr(request, "req_pool_idx") else request.kv
    return int(holder.req_pool_idx)
