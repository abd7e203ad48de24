"""What ended requests left in a real radix cache: broken, evicted, and computed again. By SGLang's own cache and
pool."""

import contextlib
import functools
import subprocess
import sys
import time
from array import array
from typing import Any

import torch

from tools.inspection import findings
from tools.recomputes import begin, finish, prompt, teach
from tools.state_faults import tensors
from tools.storms import Served, loop

PATIENCE = 400
"""Most steps until an answer comes."""


def parked_serve(engine: Any, lengths: dict[str, int], new_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """Requests by name, one after the other, each with a prompt of its own of so many tokens. Gives their outputs."""
    return {name: parked_prompt(engine, name, prompt(name, length), new_tokens, **more)
            for name, length in lengths.items()}  # fmt: skip


def parked_prompt(engine: Any, name: str, tokens: list[int], new_tokens: int = 8, **more: Any) -> list[int]:
    """One request with these tokens, to its end."""
    request = engine.submit(tokens, new_tokens, name, **more)
    while not request.finished():
        engine.step()
    engine.step()
    return list(request.output_ids)


def parked_verify(engine: Any, *, names: list[str] | None = None) -> dict[str, Any]:
    """Answers for these ended requests, or all that are remembered, in an idle engine; and findings."""
    verifier = engine.session.canary.verifier
    asked = [verifier.ask(name, parked=True) for name in (names if names is not None else [None])]
    for _ in range(PATIENCE):
        if all(one.done() for one in asked):
            break
        engine.step()
    for _ in range(2):
        engine.step()
    answers = [answer.to_dict() for one in asked for answer in one.result(0)]
    return {"answers": answers, "tables": [a.table() for one in asked for a in one.result(0)], **findings(engine)}


def parked_asked(engine: Any) -> dict[str, Any]:
    """Asks for what ended requests left, of one and of all, beside a running one that is asked for as well. And whether
    a function of the scheduler or its cache is another one than SGLang's."""
    begin(engine, {"ended": prompt("ended", 60)}, 3)
    finish(engine, "ended")
    begin(engine, {"runs": prompt("runs", 60)}, 3)
    verifier = engine.session.canary.verifier
    asked = [verifier.ask("ended", parked=True), verifier.ask(None, parked=True), verifier.ask("ended")]
    while not all(one.done() for one in asked):
        engine.step()
    finish(engine, "runs")
    told = [
        {"error": str(one.exception())} if one.exception() is not None else one.result()[0].to_dict() for one in asked
    ]
    scheduler = engine.scheduler
    wrapped = [
        name
        for owner in (scheduler, scheduler.tree_cache, scheduler.tree_cache.tree_core)
        for name, value in vars(owner).items()
        if callable(value) and type(value).__name__ == "function" and "canary" in value.__module__
    ]
    return {"answers": told, "wrapped": wrapped}


def parked_teach(engine: Any, tokens: int = 30) -> None:
    """The noise of the engine is known, and its cache empty."""
    teach(engine, tokens)
    while not engine.scheduler.flush_cache():
        engine.step()
    findings(engine)


def parked_weight(engine: Any, factor: float) -> None:
    """A weight of layer 0 changes under the kept cache, past torch's counters."""
    engine.runner.model.model.layers[0].post_attention_layernorm.weight.data.mul_(factor)


def parked_scale(engine: Any, name: str, layer: int, positions: list[int], factor: float) -> None:
    """V of a layer at these positions of a prefix, in the pool itself."""
    slots = _slots(engine, name)[positions]
    with torch.inference_mode():
        engine.runner.token_to_kv_pool.v_buffer[layer][slots] *= factor


def parked_state(engine: Any, name: str, factor: float) -> None:
    """All states behind the last token of a prefix, in the pool itself."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    prefix = _known(engine).get(name)
    core = engine.scheduler.tree_cache.tree_core
    node = core.match_full_device_prefix(RadixKey(prefix.key))[1]
    (slot,) = core.get_component_device_value(node, ComponentType.MAMBA).tolist()
    with torch.inference_mode():
        for states in tensors(engine):
            states[:, slot] *= factor


def parked_evict(engine: Any, tokens: int) -> int:
    """SGLang's own cache gives up so many tokens, or a few more; gives how many."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return int(engine.scheduler.tree_cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)


def parked_left(engine: Any) -> dict[str, int]:
    """Of each remembered request, how many tokens the cache still has."""
    return {name: _known(engine).get(name).left() for name in _known(engine).names()}


def parked_known(engine: Any) -> dict[str, Any]:
    """Names and sizes of what is remembered."""
    known = _known(engine)
    return {"names": known.names(), "tokens": known.tokens, "most": known.most_tokens}


def parked_reused(engine: Any, name: str, position: int, other: list[int]) -> list[int]:
    """The allocator hands out a slot of a prefix that the cache still names, and a request writes there."""
    pages = engine.runner.token_to_kv_pool_allocator
    slot = _slots(engine, name)[position : position + 1]
    pages.free_pages = torch.cat([slot.to(pages.free_pages.dtype), pages.free_pages[1:]])
    return parked_prompt(engine, "writes", other, 4)


def parked_tree(engine: Any) -> list[list[Any]]:
    """Of each node of a cache in Python but the root: tokens, time of the last access, hits, locks, and slots."""
    core = engine.scheduler.tree_cache.tree_core
    kind = core.component_types[0]
    found, todo = [], list(core.root_node.children.values())
    while todo:
        node = todo.pop()
        todo += node.children.values()
        data = node.component_data[kind]
        found.append([list(node.key.token_ids), node.last_access_time, node.hit_count, data.lock_ref,
                      data.value.tolist()])  # fmt: skip
    return sorted(found)


def parked_drain(engine: Any, lengths: dict[str, int]) -> list[list[int]]:
    """Has the cache evict all, a little at a time. Gives how many tokens of each prompt of `parked_serve` were there
    before each step: so the order of eviction. Without Canary's help."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    core = engine.scheduler.tree_cache.tree_core
    keys = [RadixKey(array("q", prompt(name, length))) for name, length in lengths.items()]
    seen = []
    while engine.scheduler.tree_cache.evictable_size():
        seen.append([int(core.match_full_device_prefix(key)[0]) for key in keys])
        parked_evict(engine, 16)
    return seen


def parked_idle(engine: Any, turns: int, seconds: float, share: float | None = None) -> dict[str, Any]:
    """So many turns of an idle engine, of so many seconds each by the clock of the recomputes. Gives what was proven,
    and what is free."""
    recomputes, pairs = engine.session.recompute._recomputes, engine.session.recompute.pairs
    if not hasattr(engine, "now"):
        engine.now = 100.0
        recomputes._proofs._clock = lambda: engine.now
    if share is not None:
        recomputes._share = share
    pairs.answers.clear()
    for _ in range(turns):
        engine.step()
        engine.now += seconds
    allocator = engine.scheduler.token_to_kv_pool_allocator
    answers = [(one.request, one.verdict, one.tokens) for one in pairs.answers if one.parked]
    return {"answers": answers, "free": int(allocator.available_size()), **findings(engine)}


def parked_rests(engine: Any, name: str, seconds: float) -> float:
    """After a proof of a second by the clock of the recomputes a request is served, each step of which takes so long.
    Gives the seconds from then on until the next proof may begin."""
    recomputes = engine.session.recompute._recomputes
    recomputes._proofs._rest_until = 0.0
    while recomputes._proofs._idle_since is None:
        engine.step()
    engine.now += 1.0
    request = engine.submit(prompt(name, 40), 8, name)
    while not request.finished():
        engine.step()
        engine.now += seconds
    for _ in range(2):
        engine.step()
    return float(recomputes._proofs._rest_until - engine.now)


def parked_gives_way(engine: Any, what: str, name: str | None = None) -> dict[str, Any]:
    """An idle engine proves a prefix of several chunks, or one that is asked for, and in the middle there comes
    a request (``user``) or a message that takes an idle engine (``flush``), or the prefix is evicted
    (``evict``), or that by the making of a batch with a chunk of the proof (``making``)."""
    session, scheduler = engine.session, engine.scheduler
    asked = None if name is None else session.canary.verifier.ask(name, parked=True)
    session.recompute._recomputes._proofs._rest_until = 0.0
    steps = 0
    if what == "making":
        _evict_once_made(engine)
    while not _in_the_middle(scheduler):
        engine.step()
        steps += 1
        if steps > 20:
            raise RuntimeError("no internal request is in the middle")
    done: dict[str, Any] = {}
    if what == "user":
        request = engine.submit(prompt("user", 30), 4, "user")
        engine.step()
        done["first"] = len(request.output_ids)
        done["in_the_middle"] = scheduler.chunked_req is not None
        while not request.finished():
            engine.step()
    elif what == "flush":
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        answers: list[Any] = []
        channel = scheduler.ipc_channels.send_to_tokenizer
        right, channel.send_output = channel.send_output, lambda output, *args, **kwargs: answers.append(output)
        try:
            scheduler.process_input_requests([FlushCacheReqInput()])
        finally:
            channel.send_output = right
        done["flushed"] = [bool(answer.success) for answer in answers]
    else:
        parked_evict(engine, 1 << 20)
    for _ in range(20):
        engine.step()
    if asked is not None:
        done["answer"] = asked.result(0)[0].to_dict()
    allocator = scheduler.token_to_kv_pool_allocator
    total = allocator.available_size() + scheduler.tree_cache.evictable_size()
    return {**done, "leaked": int(allocator.size - total), **findings(engine)}


def _in_the_middle(scheduler: Any) -> bool:
    return bool(scheduler.chunked_req) and scheduler.chunked_req.rid.startswith("canary-recompute")


def _evict_once_made(engine: Any) -> None:
    """The next batch with a chunk of an internal request evicts all that no request has."""
    scheduler = engine.scheduler
    usual = scheduler.get_next_batch_to_run

    @functools.wraps(usual)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = usual(*args, **kwargs)
        if _in_the_middle(scheduler):
            del scheduler.get_next_batch_to_run
            parked_evict(engine, 1 << 20)
        return made

    scheduler.get_next_batch_to_run = make


def parked_traffic(engine: Any, prompts: list[list[int]], rounds: int = 3) -> dict[str, Any]:
    """Serves the prompts in rounds, three at a time, through SGLang's own event loop; after each the engine has nobody
    to serve for some turns. Gives outputs, what was proven meanwhile, and whether anything of it is left."""
    scheduler, session, first = engine.scheduler, engine.session, len(engine.requests)
    size = -(-len(prompts) // rounds)
    waiting = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    recomputes = session.recompute._recomputes if session is not None else None
    share, idle = recomputes._share if recomputes is not None else 0.0, 0
    if session is not None:
        session.recompute.pairs.answers.clear()

    def ingest(*args: Any, **kwargs: Any) -> list[Any]:
        nonlocal idle
        alive = sum(not request.finished() for request in engine.requests[first:])
        idle = 0 if alive else idle + 1
        if recomputes is not None:
            recomputes._proofs._rest_until = 0.0
            recomputes._share = 0.0 if not waiting and idle > 30 else share
        if waiting and (0 < len(waiting[0]) < size or idle > 30):
            idle = 0
            for _ in range(3 - alive):
                engine.submit(waiting[0].pop(0), 12)
                if not waiting[0]:
                    waiting.pop(0)
                    break
        if not waiting and idle > 40:
            raise Served
        return []

    with contextlib.suppress(Served):
        loop(scheduler, ingest)
    done = {"outputs": [list(one.output_ids) for one in engine.requests[first:]]}
    if recomputes is None:
        return done
    recomputes._share = share
    answers = [(one.verdict, one.reason) for one in session.recompute.pairs.answers if one.parked]
    return {**done, "answers": answers, "in_flight": recomputes._one is not None, **findings(engine)}


def parked_flush_overlapped(engine: Any, name: str, tokens: int) -> dict[str, Any]:
    """Serves a request through the event loop of the overlap scheduler. Once the forward of a proof is under way, a
    client has the cache flushed, and sends another request behind. Gives the answer to the flush, the number of turns
    until then, and how many tokens the requests got."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    scheduler, answers = engine.scheduler, []
    channel = scheduler.ipc_channels.send_to_tokenizer
    right = channel.send_output
    requests = [engine.submit(prompt(name, tokens), 8, name)]
    sent, turns = 0, 0

    def tell(output: Any, *args: Any, **kwargs: Any) -> None:
        if type(output).__name__ == "FlushCacheReqOutput":
            answers.append((bool(output.success), turns - sent))
        else:
            right(output, *args, **kwargs)

    def ingest(*args: Any, **kwargs: Any) -> list[Any]:
        nonlocal sent, turns
        turns += 1
        proves = any(one.rid.startswith("canary") for batch, _ in scheduler.result_queue for one in batch.reqs)
        messages = [FlushCacheReqInput()] if proves and not sent else []
        sent = sent or (turns if messages else 0)
        scheduler.process_input_requests(messages)
        if answers and len(requests) == 1:
            requests.append(engine.submit(prompt("behind", 30), 4, "behind"))
        if turns > PATIENCE or (len(requests) == 2 and all(one.finished() for one in requests)):
            raise Served
        return messages

    engine.session.recompute._recomputes._proofs._rest_until = 0.0
    channel.send_output = tell
    try:
        with contextlib.suppress(Served):
            loop(scheduler, ingest)
    finally:
        channel.send_output = right
    return {"flushes": answers, "outputs": [len(one.output_ids) for one in requests], **findings(engine)}


def parked_left_out(engine: Any) -> dict[str, Any]:
    """A request with embeddings, one with the name of an adapter that is not loaded, and what Canary says of them."""
    from sglang.srt.managers.embed_types import PositionalEmbeds

    rows = torch.randn(4, engine.runner.model_config.hf_config.hidden_size)
    given = PositionalEmbeds(embeds=rows, positions=[8, 9, 10, 11])
    begin(engine, {"adapted": prompt("adapted", 40)}, 2)
    engine.requests[-1].lora_id = "adapter"
    finish(engine, "adapted")
    parked_prompt(engine, "embedded", prompt("embedded", 40), positional_embed_overrides=given)
    told = [event.fields for event in engine.told.events if event.name == "parked_left_out"]
    return {"told": told, **parked_verify(engine, names=["adapted", "embedded"])}


def parked_command(engine: Any, arguments: list[str]) -> dict[str, Any]:
    """``canary ctl verify`` as a user types it, in a process of its own. The engine goes through its loop while it is
    asked: else its requests would end before."""
    command = [sys.executable, "-m", "canary_core", "ctl", "verify", "--timeout", "100", *arguments]
    asks = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pairs = engine.session.recompute.pairs
    while asks.poll() is None:
        if pairs._asked or pairs._waiting:
            engine.step()
        else:
            time.sleep(0.01)
    out, err = asks.communicate()
    return {"code": asks.returncode, "out": out, "err": err}


def parked_begin(engine: Any, names: list[str]) -> None:
    """Requests that decode, and go on."""
    begin(engine, {name: prompt(name, 50) for name in names}, 3)


def parked_finish(engine: Any, names: list[str]) -> None:
    """Ends them."""
    finish(engine, *names)


def _known(engine: Any) -> Any:
    return engine.session.recompute.parked


def _slots(engine: Any, name: str) -> torch.Tensor:
    (slots,) = _known(engine).get(name).blocks()
    return slots


COMMANDS = (
    parked_serve, parked_prompt, parked_verify, parked_asked, parked_teach, parked_weight, parked_scale, parked_state,
    parked_evict,
    parked_left, parked_known, parked_reused, parked_tree, parked_drain, parked_idle, parked_rests, parked_gives_way,
    parked_traffic, parked_flush_overlapped, parked_left_out, parked_command, parked_begin, parked_finish,
)  # fmt: skip
"""For `engines.driver`."""
