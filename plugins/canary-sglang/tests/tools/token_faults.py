"""Bugs between the sampler and the next forward, made in SGLang's own buffers and lengths."""

import contextlib
from typing import Any

import torch

from tools.storms import Served, loop
from tools.traffic import decoding


def mix_up(engine: Any, what: str, prompts: list[list[int]], new_tokens: int = 16, turns: int = 3) -> dict[str, Any]:
    """Serves ``prompts``, makes the bug ``what`` once while all of them decode, and goes on for some ``turns``. Gives
    whom it concerns and what the sampler had given those: name → position and token."""
    requests = decoding(engine, prompts, new_tokens)
    concerned = BUGS[what](engine, requests)
    for _ in range(turns):
        engine.step()
    for request in requests:
        engine.abort(request.rid)
    while engine.scheduler.running_batch.reqs:
        engine.step()
    return concerned


def mix_up_overlapped(engine: Any, prompts: list[list[int]], new_tokens: int = 12) -> dict[str, Any]:
    """Serves ``prompts`` by SGLang's own loop with the overlap scheduler, and exchanges the next tokens of two requests
    once, between two turns: name → position and token."""
    concerned: dict[str, Any] = {}
    requests = [engine.submit(prompt, new_tokens) for prompt in prompts]

    def ingest(*args: Any, **kwargs: Any) -> list[Any]:
        if not concerned and all(len(request.output_ids) > 1 for request in requests):
            concerned.update(_exchange(engine, requests))
        if all(request.finished() for request in requests) and engine.scheduler.last_batch is None:
            raise Served
        return []

    with contextlib.suppress(Served):
        loop(engine.scheduler, ingest)
    return concerned


def _exchange(engine: Any, requests: list[Any]) -> dict[str, tuple[int, int]]:
    """The next tokens of two requests change places where they wait for the next forward."""
    tokens, batch = engine.scheduler.future_map.output_tokens_buf, engine.scheduler.running_batch
    lengths = dict(zip((request.rid for request in batch.reqs), batch.seq_lens.tolist(), strict=True))
    pair = next((a, b) for a in requests for b in requests if tokens[_row(a)] != tokens[_row(b)])
    told = {request.rid: (lengths[request.rid], int(tokens[_row(request)])) for request in pair}
    places = torch.tensor([_row(request) for request in pair])
    tokens[places] = tokens[places.flip(0)]
    return told


def _keep_draft(engine: Any, requests: list[Any]) -> dict[str, tuple[int, int]]:
    """A sequence length is one too large after a verification that has rejected a draft, which is kept so."""
    drafted = engine.args.speculative_num_draft_tokens
    request = None
    while request is None:
        before = {r.rid: len(r.output_ids) for r in requests}
        engine.step()
        request = next((r for r in requests if len(r.output_ids) - before[r.rid] < drafted), None)
    _lengthen(engine, request, 1)
    return {request.rid: (_last(request), int(request.output_ids[-1]))}


def _cut_short(engine: Any, requests: list[Any]) -> dict[str, tuple[int, int]]:
    """A sequence length is one too small: the next token is computed where the last one is."""
    request = next(r for r in requests if r in engine.scheduler.running_batch.reqs)
    _lengthen(engine, request, -1)
    return {request.rid: (_last(request) - 1, int(request.output_ids[-2]))}


def _answer_wrongly(engine: Any, requests: list[Any]) -> dict[str, tuple[int, int]]:
    """The host's copy of what was sampled has two rows exchanged; the device goes on with the right tokens."""
    scheduler = engine.scheduler
    told: dict[str, tuple[int, int]] = {}

    def run(batch: Any) -> Any:
        result = type(scheduler).run_batch(scheduler, batch)
        tokens = result.next_token_ids
        pairs = [(i, j) for i in range(len(tokens)) for j in range(i) if tokens[i] != tokens[j]]
        if batch.forward_mode.is_decode() and pairs:
            del scheduler.run_batch
            places = torch.tensor(pairs[0])
            told.update({batch.reqs[i].rid: (_last(batch.reqs[i]) + 1, int(tokens[i])) for i in pairs[0]})
            result.next_token_ids = tokens.clone()
            result.next_token_ids[places] = tokens[places.flip(0)]
        return result

    scheduler.run_batch = run
    while not told:
        engine.step()
    return told


def _lengthen(engine: Any, request: Any, by: int) -> None:
    batch = engine.scheduler.running_batch
    batch.seq_lens = batch.seq_lens.clone()
    batch.seq_lens[batch.reqs.index(request)] += by
    batch.seq_lens_cpu = batch.seq_lens.cpu()
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())


BUGS = {"exchanged": _exchange, "kept draft": _keep_draft, "cut short": _cut_short, "answered": _answer_wrongly}


def _last(request: Any) -> int:
    """The position of the token that a request was given last: all before it are in the cache."""
    return len(request.origin_input_ids) + len(request.output_ids) - 1


def _row(request: Any) -> int:
    holder = request if hasattr(request, "req_pool_idx") else request.kv
    return int(holder.req_pool_idx)
