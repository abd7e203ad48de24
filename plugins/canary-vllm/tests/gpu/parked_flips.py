"""Bits that flip in KV parked in the prefix cache of a real vLLM on a GPU, CUDA graphs, and what is answered from it.

    python3 parked_flips.py 200                  # report, protect; each with the scheduler in step, and ahead
    python3 parked_flips.py 1000 protect clean   # nothing flips

Before each request one random bit of a random layer flips in a random block that the request will hit, found by vLLM's
own lookup, in vLLM's own tensors. Tokens are counted as they are given out: ``leaked`` are requests that ended with an
error after a wrong one. Each engine is a process of its own, all at once. A row for each.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parents[3].parent / "tests"
sys.path[:0] = [str(TESTS), str(Path(__file__).resolve().parents[1])]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1",
    "CANARY_PLUGINS": "vllm", "CANARY_READ_CHECK": "0", "CANARY_SCRUB_BUDGET": "0", "CANARY_INCIDENT_LIMIT": "1",
    "CANARY_LOG_FORMAT": "json",
}  # fmt: skip
"""Only hits are compared."""
LENGTH, NEW = 80, 8
BITS = (23, 28, 29, 30)
"""Of the exponent of the upper of two bfloat16 in a word."""


class Engine:
    """vLLM in this process, with random weights with which layers matter."""

    def __init__(self, ahead: bool) -> None:
        from soak import gpu_models, on_vllm
        from soak.setups import GRAPHS, ON_GPU
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = {**ON_GPU, **GRAPHS, "enable_prefix_caching": True, "async_scheduling": ahead}
        self._engine = LLM(model=gpu_models.folder("llama", Path(tempfile.mkdtemp())), **options).llm_engine
        core = self._engine.engine_core.engine_core
        self.scheduler, self.runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
        on_vllm.randomize(self.runner.get_model())
        self._params = SamplingParams(
            max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )

    def serve(self, name: str, prompt: list[int], draw: random.Random | None = None) -> tuple[list[int], str, bool]:
        """The tokens as they came, how the request ended, and whether a bit flipped before it was scheduled."""
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._params)
        flipped = draw is not None and self._flip(draw)
        given: list[int] = []
        ended = ""
        while self._engine.has_unfinished_requests():
            for one in self._engine.step():
                given += one.outputs[0].token_ids
                ended = one.outputs[0].finish_reason or ended
        return given, ended, flipped

    def _flip(self, draw: random.Random) -> bool:
        import torch

        (request,) = self.scheduler.waiting
        found = self.scheduler.kv_cache_manager.get_computed_blocks(request)
        blocks = [block.block_id for group in found[0].blocks for block in group if not block.is_null]
        if not blocks:
            return False
        layers = self.runner.compilation_config.static_forward_context.values()
        cache = draw.choice([layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")])
        torch.cuda.synchronize()
        words = cache.view(torch.int32)[draw.choice(blocks)]
        words[tuple(draw.randrange(size) for size in words.shape)] ^= 1 << draw.choice(BITS)
        torch.cuda.synchronize()
        return True


def child(count: int, ahead: bool, clean: bool) -> None:
    """One engine."""
    from canary_vllm.hooks import HOOKS

    engine, draw, served = Engine(ahead), random.Random("parked"), Counter[str]()
    prompts = [[draw.randrange(10, 4000) for _ in range(LENGTH)] for _ in range(6)]
    for i, prompt in enumerate(prompts):
        engine.serve(f"first {i}", prompt)
    right = [engine.serve(f"right {i}", prompt)[0] for i, prompt in enumerate(prompts)]
    for turn in range(count):
        number = draw.randrange(len(prompts))
        given, ended, flipped = engine.serve(f"q{turn}", prompts[number], None if clean else draw)
        served["flipped"] += flipped
        if ended == "error":
            served["error"] += 1
            served["leaked"] += given != right[number][: len(given)]
        else:
            served["right" if given == right[number] else "wrong"] += 1
    (session,) = HOOKS.sessions
    session.canary.drain()
    stats = session.canary.stats()
    row = {name: served[name] for name in ("flipped", "right", "wrong", "error", "leaked")}
    print("ROW", json.dumps({"asked": count, **row, "hit_blocks": stats.get("hit_blocks", 0)}), flush=True)
    os._exit(0)


def run(count: int, mode: str, ahead: bool, clean: bool) -> str:
    """A process of this file: its row, and how often requests were computed again."""
    environment = {**os.environ, **ENVIRONMENT, "CANARY_ON_VIOLATION": mode}
    command = [sys.executable, __file__, str(count), *["clean"] * clean, "--child", *["--ahead"] * ahead]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400 + count, check=False)
    rows = [line.removeprefix("ROW ") for line in done.stdout.splitlines() if line.startswith("ROW ")]
    told = {name: done.stderr.count(f'"event": "{name}"') for name in ("recomputed", "aborted", "disabled")}
    return f"{rows[0]} {told}" if rows else done.stderr[-2000:]


def main() -> None:
    """All engines that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("words", nargs="*", help="report, protect, clean")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ahead", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    clean = "clean" in args.words
    if args.child:
        child(args.count, args.ahead, clean)
    modes = [word for word in args.words if word != "clean"] or ["report", "protect"]
    ways = [(mode, ahead) for mode in modes for ahead in (False, True)]
    with ThreadPoolExecutor() as pool:
        rows = pool.map(lambda way: run(args.count, *way, clean), ways)
        for (mode, ahead), row in zip(ways, rows, strict=True):
            print(mode, "ahead" if ahead else "in step", row, flush=True)


if __name__ == "__main__":
    main()
