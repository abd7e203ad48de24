"""Requests that are computed again, and engines that compute wrongly: broken by nothing but SGLang and torch."""

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tools.draft_faults import Change, broken_once, kept_draft, wrong_key
from tools.inspection import findings
from tools.state_faults import another_state, cached, exchange, lost_updates, state_of
from tools.storms import Served, loop

OPTIONS = {
    "dtype": "float32",
    "max_total_tokens": 1536,
    "max_running_requests": 6,
    "json_model_override_args": json.dumps({"num_hidden_layers": 3}),
}
"""`ServerArgs` of a small engine with three layers."""
QUIET = dict(CANARY_READ_CHECK="0", CANARY_SCRUB_BUDGET="0", CANARY_BYTES="off")
"""All checks of bytes are off."""
ASKED = {**QUIET, "CANARY_RECOMPUTE": "0"}
"""The same; and a request is computed again where somebody asks for it, and not without."""

DECODED = 40
"""Enough tokens of a decode for a verdict."""
NEVER = 200
"""New tokens of a request that goes on until it is aborted."""


def prompt(seed: object, tokens: int) -> list[int]:
    """One that no other seed begins alike."""
    draw = random.Random(f"recomputed {seed}")
    return [draw.randrange(3, 250) for _ in range(tokens)]


def recompute_traffic(engine: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Serves the prompts, up to three at a time. Gives outputs, verdicts, and what is left of internal requests in the
    pools, in the prefix cache, and in what went to clients."""
    sent, first, waiting = _sent(engine), len(engine.requests), list(prompts)
    while waiting or not all(request.finished() for request in engine.requests[first:]):
        if waiting and sum(not request.finished() for request in engine.requests[first:]) < 3:
            engine.submit(waiting.pop(0), new_tokens)
        engine.step()
    return _done(engine, first, sent)


def recompute_overlapped(engine: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """The same through SGLang's own event loop, with the overlap scheduler."""
    scheduler, waiting, sent = engine.scheduler, list(prompts), _sent(engine)
    first, idle = len(engine.requests), 0

    def ingest(*args: Any, **kwargs: Any) -> list[Any]:
        nonlocal idle
        if waiting and sum(not request.finished() for request in engine.requests[first:]) < 3:
            engine.submit(waiting.pop(0), new_tokens)
        alive = waiting or not all(request.finished() for request in engine.requests[first:])
        idle = 0 if alive else idle + 1
        # A proof of an idle engine whose result is still to come would stay as it is.
        if idle > 4 and not scheduler.result_queue:
            raise Served
        return []

    with contextlib.suppress(Served):
        loop(scheduler, ingest)
    return _done(engine, first, sent)


def _done(engine: Any, first: int, sent: dict[str, Any]) -> dict[str, Any]:
    for _ in range(3):
        engine.step()
    while engine.scheduler.chunked_req is not None:
        # An idle engine is in the middle of a proof.
        engine.step()
    served = engine.requests[first:]
    outputs, cached = [list(one.output_ids) for one in served], sum(int(one.cached_tokens) for one in served)
    return {"outputs": outputs, "cached": cached, **_left(engine, sent), **findings(engine)}


def recompute_broken(engine: Any, fault: str, tokens: int) -> dict[str, Any]:
    """Once the noise is known: a request ``ill`` that the engine computes wrongly, and another, both verified; see
    `FAULTS`. Gives verdicts and findings, those of before apart, and where a fault of one token was."""
    teach(engine)
    before = findings(engine)["violations"]
    at = FAULTS[fault](engine, prompt(fault, tokens))
    answers = verify(engine, "ill", "well")
    finish(engine, "ill", "well")
    verdicts = [one["verdict"] for one in answers]
    return {"at": at, "before": before, "verdicts": verdicts, "answers": answers, **findings(engine)}


def recompute_aborted(engine: Any, tokens: int, how: str) -> dict[str, Any]:
    """Asks for a request of several chunks, and ends the internal one in the middle. ``how``: ``abort`` (its client
    aborts the request, in an engine that decodes beside chunks), ``crowd`` (it goes on, and another request comes), or
    ``close`` (Canary's engine is shut down)."""
    sent = _sent(engine)
    begin(engine, {"long": prompt(how, tokens)}, 3)
    asked = engine.session.canary.verifier.ask("long")
    session, steps = engine.session, 0
    while not (engine.scheduler.chunked_req and engine.scheduler.chunked_req.rid.startswith("canary-recompute")):
        engine.step()
        steps += 1
        if steps > 20:
            raise RuntimeError("no internal request is in the middle")
    if how == "abort":
        engine.abort("long")
    elif how == "crowd":
        engine.submit(prompt("crowd", 30), 4, "crowd")
    else:
        from canary_core import plugins

        plugins.uninstall()
    # An aborted request has one more decode; whoever asked waits on, where others came.
    for _ in range(2 if how == "abort" else 1):
        engine.step()
    in_the_middle = engine.scheduler.chunked_req is not None
    for _ in range(60):
        if asked.done():
            break
        engine.step()
    answer = _answer(asked)
    finish(engine, "long")
    outputs = {one.rid: len(one.output_ids) for one in engine.requests if one.rid == "crowd"}
    ended = {"answer": answer, "in_the_middle": in_the_middle, "outputs": outputs}
    if how == "close":
        pools = _pools(engine)
        return {**ended, "leaked": sent["pools"] != pools, "names": sent["names"](), "closed": session.canary.enabled}
    return {**ended, **_left(engine, sent), **findings(engine)}


def teach(engine: Any, tokens: int = 30) -> None:
    """Fresh requests with prompts of so many tokens, until the noise of the engine is known."""
    pairs = engine.session.recompute.pairs
    for turn in range(30):
        if pairs.judge.noise.known:
            return
        names = [f"teach {turn}-{i}" for i in range(2)]
        begin(engine, {name: prompt(name, tokens) for name in names}, DECODED)
        verify(engine, *names)
        finish(engine, *names)
    raise RuntimeError("the noise is not known after 60 fresh requests")


def begin(engine: Any, prompts: dict[str, list[int]], decoded: int) -> None:
    """Requests by name, all of which have given out so many tokens, and go on."""
    for name, tokens in prompts.items():
        engine.submit(tokens, NEVER, name)
    begun = engine.requests[-len(prompts) :]
    while any(len(one.output_ids) < decoded for one in begun):
        engine.step()


def verify(engine: Any, *names: str) -> list[dict[str, Any]]:
    """Asks for running requests, and steps the engine until all are answered."""
    asked = [engine.session.canary.verifier.ask(name) for name in names]
    while not all(one.done() for one in asked):
        if not engine.step():
            raise RuntimeError("nothing runs, and nothing is answered")
    return [answer.to_dict() for one in asked for answer in one.result()]


def finish(engine: Any, *names: str) -> None:
    """Aborts these, and runs what is left."""
    for name in names:
        engine.abort(name)
    while engine.step():
        pass


def served_before(engine: Any, tokens: list[int]) -> None:
    """A request that leaves its prompt in the prefix cache."""
    begin(engine, {"before": tokens}, 2)
    finish(engine, "before")


def _changed_norm(engine: Any, tokens: list[int]) -> None:
    """A weight of layer 0 changes under a kept cache, past torch's counters; then a hit."""
    served_before(engine, tokens)
    weight = engine.runner.model.model.layers[0].post_attention_layernorm.weight
    weight.data.mul_(1.05)
    # A token that no prompt begins with: a hit of one token would be of the old weights, too.
    begin(engine, {"ill": [*tokens, 7], "well": [2, *tokens[::-1]]}, 2)


def _shifted_positions(engine: Any, tokens: list[int]) -> None:
    """Behind a hit the model is given positions one too many for ``ill``."""
    served_before(engine, tokens)

    def wrong(batch: Any, row: int, new: slice) -> None:
        batch.positions = batch.positions.clone()
        batch.positions[new] += 1

    with _before_forwards(engine, wrong):
        begin(engine, {"ill": [*tokens, 7], "well": [2, *tokens[::-1]]}, DECODED)


def _short_decodes(engine: Any, tokens: list[int]) -> None:
    """Where ``ill`` decodes, attention is given one token less than there are."""

    def wrong(batch: Any, row: int, new: slice) -> None:
        if batch.forward_mode.is_decode():
            batch.seq_lens = batch.seq_lens.clone()
            batch.seq_lens[row] -= 1

    with _before_forwards(engine, wrong):
        begin(engine, {"ill": tokens, "well": tokens[::-1]}, DECODED)


def _skipped_layer(engine: Any, tokens: list[int]) -> None:
    """Layer 0 adds nothing to what comes in, for the tokens of ``ill``."""
    rows: list[slice] = []
    block = engine.runner.model.model.layers[0]
    kept = {part: part.forward for part in (block.self_attn, block.mlp)}

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def skip(*args: Any, **kwargs: Any) -> Any:
            made = right(*args, **kwargs)
            for new in rows:
                made[new] = 0
            return made

        return skip

    for part, right in kept.items():
        part.forward = make(right)
    try:
        with _before_forwards(engine, lambda batch, row, new: rows.append(new), rows.clear):
            begin(engine, {"ill": tokens, "well": tokens[::-1]}, 2)
    finally:
        for part in kept:
            del part.forward


def _noisy_head(engine: Any, tokens: list[int]) -> None:
    """Where ``ill`` decodes, one of layer 0's heads of queries gives 5 % of noise, token by token."""
    rows: list[slice] = []
    attention = engine.runner.model.model.layers[0].self_attn.attn
    random = torch.Generator().manual_seed(3)

    def noisy(*args: Any, **kwargs: Any) -> Any:
        made = type(attention).forward(attention, *args, **kwargs)
        for new in rows:
            head = made.view(len(made), attention.tp_q_head_num, -1)[new, 1]
            noise = torch.randn(head.shape, generator=random).to(head.dtype)
            head += noise * (0.05 * head.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
        return made

    def decodes(batch: Any, row: int, new: slice) -> None:
        if batch.forward_mode.is_decode():
            rows.append(new)

    attention.forward = noisy
    try:
        with _before_forwards(engine, decodes, rows.clear):
            begin(engine, {"ill": tokens, "well": tokens[::-1]}, DECODED)
    finally:
        del attention.forward


def _changed_scale(engine: Any, tokens: list[int]) -> None:
    """K of layer 1 is stored under a scale that it had not when the prefix was; then a hit. SGLang's attention of a CPU
    gives the pool no scales, others do."""
    served_before(engine, tokens)
    engine.runner.token_to_kv_pool.set_kv_buffer = scaled_store(engine)
    begin(engine, {"ill": [*tokens, 7], "well": [2, *tokens[::-1]]}, 2)


def scaled_store(engine: Any) -> Callable[..., None]:
    """A store that divides K of layer 1 by a scale."""
    right = engine.runner.token_to_kv_pool.set_kv_buffer

    def scaled(layer: Any, *args: Any, **kwargs: Any) -> None:
        right(layer, *args, **{**kwargs, "k_scale": 1.5} if layer.layer_id == 1 else kwargs)

    return scaled


def mend_windows(engine: Any) -> None:
    """Decodes of SGLang 0.5.21's Triton backend see a token less of a window than its prefills (sglang#32087): from now
    on as many, but for `_short_window`."""
    backend = engine.runner.attn_backend
    right, window = backend.init_forward_metadata, backend.sliding_window_size

    def mended(batch: Any, *args: Any, **kwargs: Any) -> Any:
        backend.sliding_window_size = window + (batch.forward_mode.is_decode() and engine.mended)
        return right(batch, *args, **kwargs)

    engine.mended = True
    backend.init_forward_metadata = mended


def _short_window(engine: Any, tokens: list[int]) -> None:
    """Decodes beside ``ill`` see a token less of the window, as SGLang has them."""
    engine.mended = False
    begin(engine, {"ill": tokens}, DECODED)
    engine.mended = True
    begin(engine, {"well": tokens[::-1]}, DECODED)


def _in_a_draft(change: Change) -> Callable[[Any, list[int]], int]:
    """A fault of one token that was verified; at least so many tokens as a verdict takes follow."""

    def breaks(engine: Any, tokens: list[int]) -> int:
        with broken_once(engine, change) as at:
            begin(engine, {"ill": tokens, "well": tokens[::-1]}, 2)
            ill = next(one for one in reversed(engine.requests) if one.rid == "ill")
            while not at or len(tokens) + len(ill.output_ids) < at[0] + DECODED:
                engine.step()
        return at[0]

    return breaks


def _another_state(engine: Any, tokens: list[int]) -> int:
    """A hit goes on from the recurrent states of another prompt, for so many tokens as a verdict takes."""

    def serve(name: str, prompt: list[int]) -> None:
        begin(engine, {name: prompt}, 2)
        finish(engine, name)

    serve("before", tokens)
    other = cached(engine, lambda: serve("other", tokens[::-1]))
    with another_state(engine, other):
        begin(engine, {"ill": [*tokens, *prompt("tail", DECODED)]}, 2)
    begin(engine, {"well": [*tokens, *prompt("another tail", DECODED)]}, 2)
    return len(tokens)


def _lost_updates(engine: Any, tokens: list[int]) -> int:
    """Where ``ill`` decodes, it forgets at once."""
    with lost_updates(engine):
        begin(engine, {"ill": tokens, "well": tokens[::-1]}, DECODED)
    return len(tokens)


def _exchanged_states(engine: Any, tokens: list[int]) -> None:
    """Those of ``ill`` and of a request that nobody asks for, between two forwards."""
    begin(engine, {"ill": tokens, "well": tokens[::-1], "beside": tokens[1:]}, DECODED)
    exchange(engine, state_of(engine, "ill"), state_of(engine, "beside"))
    engine.abort("beside")


def _flipped_bit(engine: Any, tokens: list[int]) -> int:
    """A bit of V of layer 1 of one token of ``ill``, past all functions of SGLang's."""
    begin(engine, {"ill": tokens, "well": tokens[::-1]}, DECODED)
    (ill,) = (one for one in engine.requests if one.rid == "ill" and not one.finished())
    holder = ill if hasattr(ill, "req_pool_idx") else ill.kv
    slot = int(engine.runner.req_to_token_pool.req_to_token[holder.req_pool_idx, 20])
    engine.runner.token_to_kv_pool.v_buffer[1][slot].view(torch.uint8).flatten()[0] ^= 1
    return 20


FAULTS: dict[str, Callable[[Any, list[int]], int | None]] = {
    "changed_norm": _changed_norm,
    "short_decodes": _short_decodes,
    "skipped_layer": _skipped_layer,
    "shifted_positions": _shifted_positions,
    "noisy_head": _noisy_head,
    "changed_scale": _changed_scale,
    "flipped_bit": _flipped_bit,
    "short_window": _short_window,
    "kept_draft": _in_a_draft(kept_draft),
    "wrong_key": _in_a_draft(wrong_key),
    "another_state": _another_state,
    "lost_updates": _lost_updates,
    "exchanged_states": _exchanged_states,
}


@contextlib.contextmanager
def _before_forwards(
    engine: Any, change: Callable[[Any, int, slice], None], before: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """``change`` breaks each forward with ``ill``, given its `ForwardBatch`, its row and where its new tokens are."""
    runner = engine.runner

    def wrong(*args: Any, **kwargs: Any) -> Any:
        batch = args[0] if args else kwargs["forward_batch"]
        before()
        if "ill" in batch.rids:
            row = batch.rids.index("ill")
            news = [1] * len(batch.rids) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
            change(batch, row, slice(sum(news[:row]), sum(news[: row + 1])))
        return type(runner).forward(runner, *args, **kwargs)

    runner.forward = wrong
    try:
        yield
    finally:
        del runner.forward
        before()


def _answer(asked: Any) -> dict[str, Any]:
    if not asked.done():
        return {}
    error = asked.exception()
    return {"error": str(error)} if error is not None else dict(asked.result()[0].to_dict())


def _pools(engine: Any) -> list[int]:
    """Free rows of the table, and slots and states of each pool that are free or of the prefix cache."""
    scheduler = engine.scheduler
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    slots = [allocator.available_size() + tree.evictable_size()]
    if tree.supports_swa():
        slots = [
            allocator.full_available_size() + tree.full_evictable_size(),
            allocator.swa_available_size() + tree.swa_evictable_size(),
        ]
    if tree.supports_mamba():
        slots.append(scheduler.req_to_token_pool.mamba_allocator.available_size() + tree.mamba_evictable_size())
    return [int(size) for size in (scheduler.req_to_token_pool.available_size(), *slots)]


def _sent(engine: Any) -> dict[str, Any]:
    """From now on the names of requests in all that goes to clients or into the prefix cache; and the pools before."""
    names: set[str] = set()
    inserted: set[str] = set()
    scheduler = engine.scheduler
    tree = scheduler.tree_cache
    for insert in ("insert_req", "cache_unfinished_req", "checkpoint"):
        usual = getattr(tree, insert, None)
        if usual is None:
            continue

        def keep(request: Any, *args: Any, _right: Callable[..., Any] = usual, **kwargs: Any) -> Any:
            inserted.add(request.rid)
            return _right(request, *args, **kwargs)

        setattr(tree, insert, keep)
    for channel in {id(c): c for c in _channels(scheduler)}.values():
        right = channel.send_output

        def send(output: Any, *args: Any, _right: Callable[..., Any] = right, **kwargs: Any) -> Any:
            names.update(getattr(output, "rids", None) or [getattr(output, "rid", None)])
            return _right(output, *args, **kwargs)

        channel.send_output = send
    return {
        "pools": _pools(engine), "names": lambda: sorted(map(str, names)), "inserted": lambda: sorted(inserted),
    }  # fmt: skip


def _channels(scheduler: Any) -> Iterator[Any]:
    yield scheduler.output_streamer.send_to_detokenizer
    yield scheduler.ipc_channels.send_to_tokenizer
    yield scheduler.ipc_channels.send_to_detokenizer


def _left(engine: Any, sent: dict[str, Any]) -> dict[str, Any]:
    pairs = engine.session.recompute.pairs
    answers = [answer.to_dict() for answer in pairs.answers]
    pairs.answers.clear()
    return {
        "answers": answers,
        "leaked": sent["pools"] != _pools(engine),
        "names": sent["names"](),
        "inserted": sent["inserted"](),
        "on": bool(engine.session.canary.enabled),
    }
