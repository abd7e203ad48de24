"""Decodes of a real vLLM on a GPU whose model has one window in all layers: are they what its own prefill computes?

    python3 short_windows.py             # unguarded: a window of 128 tokens, or none; CUDA graphs, one split, eager
    python3 short_windows.py --guarded   # graphs and the window under Canary, which computes requests again

Of each greedy answer some tokens are asked for once more, as the first token of a fresh prompt with all before. A row
has how many agree, and of how many, by the length of the prompts. Each engine is a process of its own, all at once.
Canary is no part of it, but with ``--guarded``.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[3].parent / "tests"
sys.path[:0] = [str(TESTS), str(Path(__file__).resolve().parents[1])]
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
NEW, ASKED = 64, (4, 16, 28, 40, 52)
LENGTHS = (20, 300)
"""Tokens of prompts: an answer ends within the window, or begins behind it."""


def engine(model: str, way: str) -> Any:
    """An engine with random weights with which layers matter."""
    from soak import gpu_models, on_vllm
    from soak.setups import GRAPHS, ON_GPU
    from vllm import LLM

    options = {**ON_GPU, **({"enforce_eager": True} if way == "eager" else GRAPHS), "enable_prefix_caching": False}
    if way == "one_split":
        options["attention_config"] = {"flash_attn_max_num_splits_for_cuda_graph": 1}
    llm = LLM(model=gpu_models.folder(model, Path(tempfile.mkdtemp())), **options)
    on_vllm.randomize(
        llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    )
    return llm


def answers(llm: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens, eight requests at a time."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(one.outputs[0].token_ids) for one in llm.generate(given, params, use_tqdm=False)]


def child(model: str, way: str) -> None:
    """One engine: how many tokens agree, of how many, by the length of the prompts."""
    llm = engine(model, way)
    row = {}
    for length in LENGTHS:
        draw = random.Random(length)
        prompts = [[draw.randrange(10, 4000) for _ in range(length)] for _ in range(16)]
        decoded = answers(llm, prompts, NEW)
        pairs = [(p + a[:k], a[k]) for p, a in zip(prompts, decoded, strict=True) for k in ASKED]
        again = answers(llm, [prompt for prompt, _ in pairs], 1)
        row[length] = sum(one == [token] for one, (_, token) in zip(again, pairs, strict=True)), len(pairs)
    print("ROW", json.dumps(row), flush=True)
    os._exit(0)


def guarded() -> None:
    """Graphs and the window under Canary: the long ones teach it the noise, then the short ones are computed again."""
    from canary_vllm.hooks import HOOKS

    llm = engine("mistral", "graphs")
    (session,) = HOOKS.sessions
    for length in (*reversed(LENGTHS), LENGTHS[0]):
        draw = random.Random(f"guarded {length}")
        for _ in range(12):
            answers(llm, [[draw.randrange(10, 4000) for _ in range(length)] for _ in range(3)], 2 * NEW)
        session.canary.drain()
        stats = session.canary.stats()
        counts = {name: stats.get(name, 0) for name in ("recompute_same", "recompute_differs", "recompute_unlike")}
        print("ROW", json.dumps({"prompts": length, **counts}), flush=True)
    os._exit(0)


def run(*arguments: str, **environment: str) -> list[str]:
    """A process of this file: its rows."""
    environment = {**os.environ, **ENVIRONMENT, "CANARY_PLUGINS": "", **environment}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    rows = [line.removeprefix("ROW ") for line in done.stdout.splitlines() if line.startswith("ROW ")]
    found = [line for line in done.stderr.splitlines() if '"event": "incident"' in line or "unrelated tokens" in line]
    return [*rows, *found[:4]] or [done.stderr[-2000:]]


def main() -> None:
    """All engines that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guarded", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child and args.child[0] == "guarded":
        guarded()
    elif args.child:
        child(*args.child)
    elif args.guarded:
        more = {"CANARY_PLUGINS": "vllm", "CANARY_RECOMPUTE": "100%", "CANARY_LOG_FORMAT": "json"}
        print("\n".join(run("--child", "guarded", "-", **more)))
    else:
        ways = [("mistral", "graphs"), ("mistral", "one_split"), ("mistral", "eager"), ("llama", "graphs")]
        with ThreadPoolExecutor() as pool:
            for way, rows in zip(ways, pool.map(lambda way: run("--child", *way), ways), strict=True):
                print(*way, *rows)


if __name__ == "__main__":
    main()
