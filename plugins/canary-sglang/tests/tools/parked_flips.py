"""Bits that flip in KV parked in the prefix cache, and what is answered from it.

python -m tools.parked_flips COUNT [MODE ...] [overlap] [gpu] [host] [files] [window] [eagle] [states] [checkpoints]
[late] [clean] [x8] [t2], in this folder: a line of JSON for each mode and `ROUND` requests, the sums of all so far.
With ``host``, HiCache, whose copies in host memory flip; with ``files``, those in its storage back end; with
``window``, a model with sliding windows; with ``eagle``, a model that drafts; with ``states``, one with recurrent
states, in which bits flip, too; with ``checkpoints``, one whose forwards take checkpoints of them; with ``late``, the
order of things on a GPU (`tools.late_verdicts`); with ``x8``, eight requests at a time; with ``t2``, answers of two
tokens.
"""

import contextlib
import functools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from canary_sglang.compat import schedulers
from engines.setups import CHECKPOINTS, HICACHE, SETUPS, SPECULATIVE, TRITON

from tools.storms import Served, loop
from tools.traffic import lost_slots

LENGTH, NEW_TOKENS = 40, 6
STATE_LENGTH = 66
"""Of what prompts begin with, for a model with recurrent states."""
WINDOW = 16
"""Of the model with windows."""

BITS = (23, 28, 29, 30)
"""Of the exponent of a 32-bit float: a flip of a lower bit seldom changes a tiny model's answer."""

FILES: dict[str, Any] = {
    **HICACHE,
    # The host pool is smaller than what is served, too.
    "hicache_ratio": 1.5,
    "page_size": 4,
    "served_model_name": "tiny",
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 4}',
}
PRIVATE = {"CANARY_LEDGER_PRIVATE": "HiCacheFile"}

STATES: dict[str, Any] = {**SETUPS["short_conv"].options, "max_mamba_cache_size": 48}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "float32"},
    "overlap": {"dtype": "float32", "disable_overlap_schedule": False},
    "host": {"dtype": "float32", **HICACHE},
    "overlap host": {"dtype": "float32", "disable_overlap_schedule": False, **HICACHE},
    "files": {"dtype": "float32", **FILES},
    "overlap files": {"dtype": "float32", "disable_overlap_schedule": False, **FILES},
    "window": {"dtype": "float32", "model": "cohere2", "attention_backend": "triton"},
    "overlap window": {
        "dtype": "float32",
        "model": "cohere2",
        "attention_backend": "triton",
        "disable_overlap_schedule": False,
    },
    "states": STATES,
    "checkpoints": SETUPS["mamba2"].options | CHECKPOINTS,
    "overlap checkpoints": SETUPS["mamba2"].options | CHECKPOINTS | {"disable_overlap_schedule": False},
    "eagle": SPECULATIVE["eagle"].options,
    "overlap eagle": SPECULATIVE["eagle"].options | {"disable_overlap_schedule": False},
    "gpu": {"device": "cuda", "model": "gpu_llama"},
    "gpu overlap": {"device": "cuda", "model": "gpu_llama", "disable_overlap_schedule": False},
    "gpu overlap eagle": {
        "device": "cuda",
        "model": "gpu_llama",
        "disable_overlap_schedule": False,
        "draft_model": "gpu_llama_draft",
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    },
    "gpu host": {"device": "cuda", "model": "gpu_llama", **HICACHE},
    "gpu overlap host": {"device": "cuda", "model": "gpu_llama", "disable_overlap_schedule": False, **HICACHE},
}
"""`ServerArgs` of the engines, without and with the overlap scheduler, with HiCache, with sliding windows, with
recurrent states, and on a GPU with CUDA graphs."""

ENVIRONMENT: dict[str, str] = {
    **TRITON,
    "CANARY_BACKEND": "torch",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}
"""Of engines on a CPU whose kernels Triton interprets."""

QUIET = {"CANARY_READ_CHECK": "0", "CANARY_SCRUB_BUDGET": "0", "CANARY_INCIDENT_LIMIT": "1"}
"""Settings under which only hits are compared."""

ROUND = 1000
"""Requests after which others are asked."""

PATIENCE = 2000
PATIENCE_S = 60
"""Turns of the loop, and seconds, for one request, at most."""


def serve_parked(
    engine: Any,
    count: int,
    seed: int = 0,
    flips: bool = True,
    together: int = 1,
    where: str = "device",
    new: int = NEW_TOKENS,
    **more: Any,
) -> dict[str, Any]:
    """Through SGLang's own event loop: ``count`` requests, ``together`` at a time, for a few prompts whose KV is
    parked; before each a random bit of a random layer and half flips in a random slot that it will hit, in SGLang's own
    tensors. ``where`` is ``host``: a bit flips in every slot of HiCache's host memory in the place of that, if the
    request will be loaded something from there; ``files``: in every file of its storage back end, before the request
    comes. Counts the answers: ``right`` as the ones before any flip, ``wrong``, or an ``error``, which must be told to
    the client with status 503 and no content; ``kept``: what an erring request had given out, if not the beginning of
    the right answer. ``new``: tokens of each. ``more``: fields of SGLang's message.

    A model with recurrent states goes on from a state as of the beginning of a prompt, or from none: there prompts have
    one, which is served before each. The bit flips in that state, or in KV before. ``lost``: slots of KV and of states
    that neither the allocators nor the prefix cache have in the end."""
    draw = random.Random(f"parked {seed}")
    begins, prompts = _prompts(engine, draw)
    _answers(engine, prompts, new)
    engine.scheduler.flush_cache()
    right = _answers(engine, prompts, new)
    _answers(engine, prompts, new)
    events, served, before = len(engine.told.events), Counter[str](), len(engine.requests)
    told = _listen(engine.scheduler)
    for first in range(0, count, together):
        numbers = [draw.randrange(len(prompts)) for _ in range(min(together, count - first))]
        _answers(engine, [begins[number] for number in numbers if begins], 1)
        if flips and where == "files":
            served["flipped"] += _flip_in_files(draw)
        requests = [engine.submit(prompts[number], new, **more) for number in numbers]
        for request in requests:
            # Where nothing of it is parked any more, the request parks it again.
            if flips and where != "files":
                served["flipped"] += (_flip_in_host if where == "host" else _flip_parked)(engine, request, draw)
        _run(engine, requests)
        for request, number in zip(requests, numbers, strict=True):
            answer = list(request.output_ids)
            reason = request.finished_reason.to_json()
            if reason["type"] == "abort":
                assert reason["status_code"] == 503
                assert told[request.rid] == reason
                assert not any(str(token) in reason["message"] for token in (*prompts[number], *right[number]))
                served["error"] += 1
                served["kept"] += answer != right[number][: len(answer)]
            else:
                served["right" if answer == right[number] else "wrong"] += 1
    since = engine.told.events[events:]
    names = ("recomputed", "aborted", "quarantined", "quarantine_failed", "disabled", "reporting_failed")
    return {
        "asked": count,
        **{name: served[name] for name in ("flipped", "right", "wrong", "error", "kept")},
        **{name: sum(event.name == name for event in since) for name in names},
        "retracted": sum(request.retraction_count for request in engine.requests[before:]),
        "lost": lost_slots(engine.scheduler),
        **_arrivals(engine),
        "hit_slots": engine.session.canary.stats().get("hit_slots", 0),
    }


def serve_changed_within(engine: Any, count: int) -> dict[str, Any]:
    """Through SGLang's own event loop, one by one: ``count`` requests. Within a decode of each, after the comparison of
    what is read and before the second layer, a slot of its prompt is overwritten in that layer. Counts the answers:
    ``right`` as the ones before, ``wrong``, or an ``error``."""
    draw, served = random.Random("within"), Counter[str]()
    prompts = [[draw.randrange(3, 250) for _ in range(LENGTH)] for _ in range(count)]
    right = _answers(engine, prompts, 12)
    engine.scheduler.flush_cache()
    events = len(engine.told.events)
    for prompt, due in zip(prompts, right, strict=True):
        request = engine.submit(prompt, 12)
        hook = engine.runner.model.model.layers[1].register_forward_pre_hook(_overwriting(engine, request, draw))
        _run(engine, [request])
        hook.remove()
        ended = request.finished_reason.to_json()["type"]
        served["error" if ended == "abort" else "right" if list(request.output_ids) == due else "wrong"] += 1
    told = Counter(event.name for event in engine.told.events[events:])
    names = ("aborted", "quarantine_failed", "disabled", "reporting_failed")
    return {name: served[name] for name in ("right", "wrong", "error")} | {name: told[name] for name in names}


def _overwriting(engine: Any, request: Any, draw: random.Random) -> Any:
    changed: list[int] = []

    def overwrite(*_: Any) -> None:
        if not changed and len(request.output_ids) == 5:
            pool = engine.runner.token_to_kv_pool
            row = schedulers.table_row(engine.scheduler, request)[0]
            changed.append(int(row[draw.randrange(LENGTH)]))
            for buffers in (pool.k_buffer, pool.v_buffer):
                buffers[1][changed[0]] = 1e4

    return overwrite


def _prompts(engine: Any, draw: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """What is asked, and the beginning of each that is served before, if there is one."""

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 250) for _ in range(count)]

    if not hasattr(engine.runner.req_to_token_pool, "mamba_pool"):
        return [], [tokens(LENGTH) for _ in range(6)]
    # Longer than a chunk, at whose end a checkpoint is taken.
    begins = [tokens(STATE_LENGTH) for _ in range(3)] * 2
    return begins, [begin + tokens(5) for begin in begins]


def _arrivals(engine: Any) -> dict[str, int]:
    """How many slots came from a storage back end, and the ledger's words about their pages."""
    stats = engine.session.canary.stats()
    names = ("ledger_compared", "ledger_matched", "ledger_differing", "ledger_unknown", "ledger_unjudged")
    return {name: stats[name] for name in names if stats.get(name)}


def _flip_in_files(draw: random.Random) -> bool:
    """Flips a bit in each file."""
    files = sorted(Path(os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"]).glob("*.bin"))
    for file in files:
        content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.int32)
        content[draw.randrange(len(content))] ^= 1 << draw.choice(BITS)
        file.write_bytes(content.numpy().tobytes())
    return bool(files)


def _answers(engine: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        request = engine.submit(prompt, new)
        _run(engine, [request])
        answers.append(list(request.output_ids))
    return answers


def _run(engine: Any, requests: list[Any]) -> None:
    """SGLang's event loop until the requests have ended and the engine has idled, when it looks for lost slots."""
    turns = idle = 0
    late = time.monotonic() + PATIENCE_S

    def ingest(*args: Any, **kwargs: Any) -> list[Any]:
        nonlocal turns, idle
        turns += 1
        idle = 0 if engine.scheduler.last_batch is not None else idle + 1
        if idle > 2 and all(request.finished() for request in requests):
            raise Served
        if engine.scheduler.waiting_queue and engine.scheduler.last_batch is None:
            # Another thread reads files.
            time.sleep(0.001)
        if turns > PATIENCE and time.monotonic() > late:
            raise RuntimeError("a request never ends")
        return []

    with contextlib.suppress(Served):
        loop(engine.scheduler, ingest)


def _listen(scheduler: Any) -> dict[str, Any]:
    """The ends of requests as told to SGLang's process of clients from now on, by name."""
    told: dict[str, Any] = {}
    channels = scheduler.ipc_channels
    for sender in {id(each): each for each in (channels.send_to_tokenizer, channels.send_to_detokenizer)}.values():
        sender.send_output = functools.partial(_note, told, sender.send_output)
    return told


def _note(told: dict[str, Any], send: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    """``send`` an output; the ends of requests in it become part of ``told``."""
    if type(output).__name__ == "AbortReq":
        told[output.rid] = output.finished_reason
    elif reasons := getattr(output, "finished_reasons", None):
        # A request that has given out tokens ends with those of its batch.
        told.update((rid, reason) for rid, reason in zip(output.rids, reasons, strict=True) if reason)
    return send(output, *args, **kwargs)


def _flip_parked(engine: Any, request: Any, draw: random.Random) -> bool:
    """Flips a bit in a slot that a waiting request will hit, by SGLang's own lookup; False where there is none."""
    request.init_next_round_input(engine.scheduler.tree_cache)
    state = looked_up_state(engine.scheduler, request)
    slots = looked_up_slots(engine.scheduler, request)
    if not slots:
        return False
    pool, slot = engine.runner.token_to_kv_pool, draw.choice(slots)
    if state is not None:
        pool = pool.full_kv_pool
        if draw.random() < 0.5:
            flip_state(engine.runner.req_to_token_pool.mamba_pool, state, draw)
            return True
    if hasattr(pool, "swa_kv_pool"):
        # In a window's pool lies what the window will reach.
        late = draw.choice(slots[-WINDOW // 2 :])
        places = [(pool.full_kv_pool, slot), (pool.swa_kv_pool, int(pool.full_to_swa_index_mapping[late]))]
        pool, slot = draw.choice(places)
    _flip(draw.choice((pool.k_buffer, pool.v_buffer))[draw.randrange(pool.layer_num)][slot], draw)
    return True


def flip_state(pool: Any, slot: int, draw: random.Random) -> None:
    """Flips a bit of a recurrent state of a `MambaPool`, in a random layer of its convolutions or of what they feed."""
    kept = pool.mamba_cache
    part = draw.choice([part for part in (*kept.conv, kept.temporal) if part.numel()])
    _flip(part[draw.randrange(len(part)), slot], draw)


def looked_up_slots(scheduler: Any, request: Any) -> list[int]:
    """Slots of the prefix on the device that a waiting request hits, by SGLang's last lookup."""
    slots = getattr(request, "prefix_indices", None)
    found = scheduler.tree_cache.prefix_device_indices(request) if slots is None else slots
    return list(found.tolist())


def looked_up_state(scheduler: Any, request: Any) -> int | None:
    """The slot of the state that a waiting request will go on from, None without one. The request gives back what it
    was given for that, as one that SGLang looks up and can't admit."""
    if not hasattr(scheduler.req_to_token_pool, "mamba_pool"):
        return None
    kv = request.kv
    state, kv.mamba_cow_src_index, kv.mamba_needs_clear = kv.mamba_cow_src_index, None, False
    if kv.mamba_pool_idx is not None:
        scheduler.req_to_token_pool.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(-1))
        kv.mamba_pool_idx = None
    return None if state is None else int(state)


def _flip_in_host(engine: Any, request: Any, draw: random.Random) -> bool:
    """Flips a bit in each slot of the host pool; False where a waiting request will be loaded nothing from there."""
    cache = engine.scheduler.tree_cache
    request.init_next_round_input(cache)
    if not request.host_hit_length:
        return False
    pool = cache.cache_controller.mem_pool_host
    pool = pool.anchor_entry.host_pool if hasattr(pool, "anchor_entry") else pool
    for slot in pool.slot_used.nonzero()[:, 0].tolist():
        _flip(draw.choice((pool.k_buffer, pool.v_buffer))[draw.randrange(pool.layer_num)][slot], draw)
    return True


def _flip(slot: torch.Tensor, draw: random.Random) -> None:
    words = slot.view(torch.int32)
    words[tuple(draw.randrange(size) for size in words.shape)] ^= 1 << draw.choice(BITS)


def main() -> None:
    """An engine for each mode."""
    from engines.process import EngineProcess
    from engines.setups import Setup

    words = sys.argv[2:]
    beside = ("gpu", "overlap", "host", "files", "window", "states", "checkpoints", "eagle")
    numbers = {word[0]: int(word[1:]) for word in words if word[1:].isdecimal()}
    size = {"together": numbers.get("x", 1), "new": numbers.get("t", NEW_TOKENS)}
    modes = [word for word in words if word.isalpha() and word not in (*beside, "clean", "late")] or [
        "report",
        "protect",
    ]
    interpreted = {"files", "window", "eagle", "states", "checkpoints"} & set(words) and "gpu" not in words
    kernels = ENVIRONMENT if interpreted else {}
    kind = " ".join(word for word in beside if word in words) or "plain"
    setup = Setup(OPTIONS[kind], kernels, patience_s=1800)
    where = next((word for word in ("host", "files") if word in words), "device")
    for mode in modes:
        with tempfile.TemporaryDirectory() as folder:
            store = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": folder}
            engine = EngineProcess(setup, Path(folder), CANARY_ON_VIOLATION=mode, **QUIET, **PRIVATE, **store)
            if "late" in words:
                engine.know_findings_with_tokens()
            served, began, count = Counter[str](), time.monotonic(), int(sys.argv[1])
            for first in range(0, count, ROUND):
                part = {"count": min(ROUND, count - first), "seed": first // ROUND, **size}
                found = engine.serve_parked(flips="clean" not in words, where=where, **part)
                # Counted by Canary since the engine began.
                served |= {name: found.pop(name) for name in [*found] if name.startswith(("hit_", "ledger_"))}
                served += Counter(found)
                rate = round(served["asked"] / (time.monotonic() - began), 1)
                told = {name: served[name] for name in (*found, *served)}
                sys.stdout.write(json.dumps({"mode": mode, **told, "per_s": rate}) + "\n")
                sys.stdout.flush()
            engine.close()


if __name__ == "__main__":
    main()
