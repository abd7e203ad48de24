"""A plugin of SGLang's own for `engines.ranks_script`: bits flip in one rank's KV, whether or not Canary is there.

``RANKS_FOLDER`` has ``control``: ``parked``, a bit in what each new request will hit; ``either``, the same in a rank
that is drawn each time; ``host``, one in each slot of HiCache's host memory before a request is loaded from there;
``decoding``, a bit now and then in a slot of a running request; ``kill``, the rank's end within a batch; anything else,
nothing. It gets ``flips``, a line for each flip. Both ranks look up what a request hits, so that their prefix caches
stay alike.

python -m tools.rank_flips COUNT [MODE ...] [plain] [decoding] [host] [states] [clean] [dp | pp], in the folder of the
tests: a line of JSON for each mode of ``CANARY_ON_VIOLATION``, with the overlap scheduler unless ``plain``. ``host``:
with HiCache; ``states``: a model with recurrent states, in which bits flip, too; ``dp``: data-parallel attention,
``pp``: two stages of a pipeline, in the place of tensor parallelism.
"""

import json
import os
import random
import re
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from engines.setups import HICACHE, SETUPS

from tools.parked_flips import ENVIRONMENT, flip_state, looked_up_slots, looked_up_state

FOLDER = Path(os.environ.get("RANKS_FOLDER", "."))
BROKEN_RANK = 1
BITS = (23, 28, 29, 30)
"""Of the exponent of a 32-bit float."""

BEYOND = 5
"""Tokens of a prompt behind the recurrent state that it goes on from."""

EVERY = 7
"""Batches between two flips in running requests."""

DRAW, COIN = random.Random("rank"), random.Random("coin")


def install() -> None:
    """The plugin, which each of SGLang's processes runs before anything else."""
    from engines.models import randomize
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    load, add, run = ModelRunner.load_model, Scheduler._add_request_to_queue, Scheduler.run_batch
    batches = 0

    def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        done = load(runner, *args, **kwargs)
        randomize(runner.model)
        return done

    def add_request(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if control() in ("parked", "either") and not (args or kwargs):
            request.init_next_round_input(scheduler.tree_cache)
            broken = BROKEN_RANK if control() == "parked" else COIN.randrange(2)
            state = looked_up_state(scheduler, request)
            flip(scheduler, looked_up_slots(scheduler, request), broken, state)
        if control() == "host" and not (args or kwargs):
            request.init_next_round_input(scheduler.tree_cache)
            flip_host(scheduler, request)
        return add(scheduler, request, *args, **kwargs)

    def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal batches
        batches += 1
        wanted = control()
        if wanted == "kill" and batch.forward_mode.is_decode() and torch.distributed.get_rank() == BROKEN_RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        if wanted == "decoding" and batches % EVERY == 0 and batch.forward_mode.is_decode():
            row = DRAW.randrange(len(batch.reqs))
            slots = scheduler.req_to_token_pool.req_to_token[batch.req_pool_indices[row]]
            flip(scheduler, slots[: len(batch.reqs[row].origin_input_ids)].tolist())
        return run(scheduler, batch, *args, **kwargs)

    ModelRunner.load_model = load_model
    Scheduler._add_request_to_queue, Scheduler.run_batch = add_request, run_batch


def control() -> str:
    """Of the present phase."""
    file = FOLDER / "control"
    return file.read_text() if file.exists() else ""


def flip(scheduler: Any, slots: list[int], broken: int = BROKEN_RANK, state: int | None = None) -> None:
    """Flips a bit in one of ``slots`` of the broken rank's pool, if there are any, or in a recurrent ``state``."""
    if not slots or torch.distributed.get_rank() != broken:
        return
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if state is not None and DRAW.random() < 0.5:
        flip_state(scheduler.req_to_token_pool.mamba_pool, state, DRAW)
    else:
        pool = getattr(pool, "full_kv_pool", pool)
        words = DRAW.choice((pool.k_buffer, pool.v_buffer))[DRAW.randrange(pool.layer_num)][DRAW.choice(slots)]
        words = words.view(torch.int32)
        words[tuple(DRAW.randrange(size) for size in words.shape)] ^= 1 << DRAW.choice(BITS)
    with FOLDER.joinpath("flips").open("a") as file:
        file.write(f"{broken}\n")


def flip_host(scheduler: Any, request: Any) -> None:
    """Flips a bit in each slot of the broken rank's host memory, if ``request`` will be loaded something from there."""
    if not request.host_hit_length or torch.distributed.get_rank() != BROKEN_RANK:
        return
    pool = scheduler.tree_cache.cache_controller.mem_pool_host
    pool = pool.anchor_entry.host_pool if hasattr(pool, "anchor_entry") else pool
    for slot in pool.slot_used.nonzero()[:, 0].tolist():
        words = DRAW.choice((pool.k_buffer, pool.v_buffer))[DRAW.randrange(pool.layer_num)][slot].view(torch.int32)
        words[tuple(DRAW.randrange(size) for size in words.shape)] ^= 1 << DRAW.choice(BITS)
    with FOLDER.joinpath("flips").open("a") as file:
        file.write(f"{BROKEN_RANK}\n")


ENGINES: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2, "model": "llama"},
    "host": {"tp_size": 2, "model": "llama", **HICACHE},
    "states": {"tp_size": 2, **SETUPS["short_conv"].options},
    "dp": {
        "tp_size": 2,
        "dp_size": 2,
        "enable_dp_attention": True,
        "load_balance_method": "round_robin",
        "model": "qwen3",
    },
    "pp": {"pp_size": 2, "model": "llama"},
}
"""`ServerArgs` by the kind of ranks."""

PLUGINS = {"host": ["copies = host_copies:install"], "dp": ["data_parallel = data_parallel:install"]}
INTERPRETED = {"dp": ENVIRONMENT, "states": ENVIRONMENT}


def serve_flipped(
    folder: Path, count: int, control: str = "parked", kind: str = "tp", overlap: bool = True, **settings: str
) -> Any:
    """``count`` requests for a few prompts whose KV is parked, one at a time (four with ``decoding``; two with ``dp``,
    one for each rank) in one of `ENGINES`, while bits flip. Counts the answers as `tools.parked_flips` does, and the
    events of each rank. ``clean``: the answers before any flip."""
    from engines.ranks import phase, serve

    draw = random.Random("parked")
    prompts = [[draw.randrange(3, 250) for _ in range(40)] for _ in range(6)]
    together, new = (4, 24) if control == "decoding" else (2, 6) if kind == "dp" else (1, 6)
    rounds = [[draw.randrange(len(prompts)) for _ in range(together)] for _ in range(count // together)]
    # Each rank of data-parallel attention has a prefix cache of its own.
    clean = [phase("nothing", [prompt] * (2 if kind == "dp" else 1), new) for prompt in prompts] * 2
    asked = [phase(control, [prompts[n] for n in numbers], new) for numbers in rounds]
    # Only what goes on from the end of another prompt goes on from a recurrent state.
    begun = [phase("nothing", [prompts[n][:-BEYOND] for n in numbers], 1) for numbers in rounds]
    phases = clean + ([one for pair in zip(begun, asked, strict=True) for one in pair] if kind == "states" else asked)
    options = {"dtype": "float32", "disable_overlap_schedule": not overlap, **ENGINES[kind]}
    plugins = ["flips = tools.rank_flips:install", *PLUGINS.get(kind, ())]
    done = serve(folder, options, phases, plugins, **INTERPRETED.get(kind, {}), **settings)
    right = [answers[0]["tokens"] for answers in done[: len(prompts)]]
    served, kinds = Counter[str](), set[str]()
    told = done[len(clean) :][1::2] if kind == "states" else done[len(clean) :]
    for numbers, answers in zip(rounds, told, strict=True):
        for number, answer in zip(numbers, answers, strict=True):
            if answer["status"] == 503:
                served["error"] += 1
                why = re.search(r"the KV cache of this request is corrupted \((\w+)\); try again", answer["error"])
                assert why, answer["error"]
                kinds.add(why[1])
            else:
                served["right" if (answer["status"], answer["tokens"]) == (200, right[number]) else "wrong"] += 1
    flips = folder / "flips"
    flipped = flips.read_text().split() if flips.exists() else []
    return {
        "asked": count,
        "flipped": [flipped.count(str(rank)) for rank in (0, 1)],
        **{name: served[name] for name in ("right", "wrong", "error")},
        "kinds": sorted(kinds),
        **_told(folder, kind),
        "clean": [[answer["tokens"] for answer in answers] for answers in done[: len(clean)]],
    }


def _told(folder: Path, kind: str) -> dict[str, Any]:
    """How many events of some names each rank told, and whether both ran the same batches; nothing without Canary."""
    from engines.ranks import told

    if not folder.joinpath("rank0.jsonl").exists():
        return {}
    events = [[event["event"] for event in told(folder, rank, "event")] for rank in (0, 1)]
    names = ("recomputed", "aborted", "quarantined", "quarantine_failed", "disabled", "reporting_failed")
    return {
        **{name: [events[rank].count(name) for rank in (0, 1)] for name in names},
        "alike": kind == "dp" or alike(*(told(folder, rank, "forward") for rank in (0, 1))),
    }


def alike(ours: list[str], theirs: list[str]) -> bool:
    """Whether two ranks ran the same batches. The overlap scheduler's last one, which nobody waits for, may be cut
    short on one of them by the engine's end."""
    count = min(len(ours), len(theirs))
    return abs(len(ours) - len(theirs)) <= 1 and ours[:count] == theirs[:count]


def main() -> None:
    """An engine for each mode."""
    words = sys.argv[2:]
    kind = next((word for word in ENGINES if word in words), "tp")
    options = ("plain", "decoding", "clean", *ENGINES)
    control = "either" if kind in ("dp", "pp") else "host" if kind == "host" else "parked"
    control = "nothing" if "clean" in words else "decoding" if "decoding" in words else control
    for mode in [word for word in words if word not in options] or ["report", "protect"]:
        compared = {"CANARY_READ_CHECK": "-1" if control == "decoding" else "0", "CANARY_SCRUB_BUDGET": "0"}
        guard = {"CANARY_PLUGINS": "sglang,ranks_witness", "CANARY_ON_VIOLATION": mode, **compared}
        with tempfile.TemporaryDirectory() as folder:
            overlap = "plain" not in words
            served = serve_flipped(Path(folder) / "e", int(sys.argv[1]), control, kind, overlap, **guard)
        del served["clean"]
        sys.stdout.write(json.dumps({"mode": mode, **served}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
