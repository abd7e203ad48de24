"""What Canary costs a real vLLM engine: switched on and off in turns within one engine; random weights, CUDA graphs.

    python3 overhead.py --out overhead.jsonl                      # Llama-8B's shape, 64 x (1024 + 256) and 1 x 8000
    python3 overhead.py --arms off,on,on@0                        # how much of it is the scrub
    CANARY_ON_VIOLATION=protect python3 overhead.py --hits 1024,8192,65536    # and of a prefix hit of so many tokens
    python3 overhead.py --device cpu --pairs 2                    # a check that the script runs

Both arms of a pair serve the same prompts, from an empty prefix cache, so drift of the machine and differences between
engines fall out: the loss is the median of the pairs' losses. Prefill is all prompts with one new token each; decode is
the same prompts again, cached now, with all new tokens; a step is the median time of one decode in it, which knows
nothing of how requests begin and end, and little of a host that is busy with something else now and then. A hit is the
median time to the only token of a request whose prompt is in the prefix cache but for its last block.

Time on an H200: 50 s to start on a machine that has run an engine before, 15 s to warm up, 4 s an arm of the first
workload, 5 s of the second. Results go to ``--out``, a JSON object a line; the table comes last.
"""

import argparse
import cProfile
import io
import itertools
import json
import os
import pstats
import random
import statistics
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

PHASES = {"prefill": "prefill_tokens_s", "decode": "decode_tokens_s", "step": "steps_s", "hit": "hits_s"}
"""What is told of each arm, and its name in the results."""
WORKLOADS = {"batch": (64, 1024, 256, 1), "prompt": (1, 8000, 1, 4)}
"""Requests, prompt tokens, new tokens, repetitions of a turn."""
HITS = 9
"""Requests for one cached prompt, in a turn."""
SMALL = {"batch": (4, 60, 12, 1), "prompt": (1, 200, 1, 2)}
LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", max_position_embeddings=16384,
    rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
SHAPE = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=128256, torch_dtype="bfloat16",
)  # fmt: skip
TINY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=512, torch_dtype="float32",
)  # fmt: skip


def parser(text: str | None) -> argparse.ArgumentParser:
    """The part of the command line that says what is served."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asynchronous", action="store_true", help="the scheduler runs ahead, as vllm serve has it")
    parser.add_argument("--hits", default="", help="lengths of cached prompts, with commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "overhead.jsonl")
    return parser


def arguments() -> argparse.Namespace:
    """The command line."""
    options = parser(__doc__)
    options.add_argument("--arms", default="off,on", help="off, on, on@<scrub budget>")
    options.add_argument("--workloads", default="batch,prompt")
    options.add_argument("--pairs", type=int, default=10, help="turns through the arms")
    options.add_argument("--budget-s", type=int, default=500, help="no further turn begins after so many seconds")
    options.add_argument("--profile", action="store_true", help="also where the time of one decode and of hits goes")
    return options.parse_args()


def prepare(args: argparse.Namespace) -> None:
    """The environment, before vLLM is imported: starts this program again where canary-vllm is not installed."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING", "CANARY_PLUGINS": "vllm",
    }  # fmt: skip
    if args.device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if not entry_points(group="canary", name="vllm"):
        folder = args.out.resolve().parent / "entry"
        info = folder / "canary_vllm_here-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: canary_vllm_here\nVersion: 0\n")
        info.joinpath("entry_points.txt").write_text(
            "[canary]\nvllm = canary_vllm.plugin\n[vllm.general_plugins]\ncanary = canary_vllm.plugin:start\n"
        )
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        os.execv(sys.executable, [sys.executable, *sys.argv])


class Served:
    """The engine, and its switch."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        cpu = args.device == "cpu"
        folder = args.out.resolve().parent / f"model-{args.device}"
        folder.mkdir(parents=True, exist_ok=True)
        hits = list(map(int, filter(None, args.hits.split(","))))
        longest = max([0, *hits]) + 64
        positions = max(LLAMA["max_position_embeddings"], longest)
        config = {**LLAMA, **(TINY if cpu else SHAPE), "max_position_embeddings": positions}
        (folder / "config.json").write_text(json.dumps(config))
        sizes = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 16, 64, 72]}
        options: dict[str, Any] = dict(
            max_model_len=max(8192, longest), gpu_memory_utilization=0.5, compilation_config=sizes
        )
        if cpu:
            options = dict(
                max_model_len=max(256, longest),
                enforce_eager=True,
                block_size=32,
                num_gpu_blocks_override=100 + sum(hits) // 32,
            )
        if args.asynchronous:
            # In one process vLLM does not schedule ahead by itself, as it does where it is served.
            options["async_scheduling"] = True
        dtype = "float32" if cpu else "bfloat16"
        # Room for requests that are computed again.
        self.llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype=dtype, seed=1, max_num_seqs=72,
            enable_prefix_caching=True, **options,
        )  # fmt: skip
        self.vocabulary = 500 if cpu else 100_000
        from canary_vllm.hooks import HOOKS

        (self.session,) = HOOKS.sessions
        self._ended: list[float] = []
        step = self.llm.llm_engine.step

        def timed_step() -> Any:
            outputs = step()
            self._ended.append(time.perf_counter())
            return outputs

        self.llm.llm_engine.step = timed_step
        self._budget = self.session.canary.step.scrub.budget

    def turn(self, arm: str) -> None:
        """Switches Canary, which must forget what it did not see."""
        from canary_core.config import ScrubBudget

        name, _, budget = arm.partition("@")
        canary = self.session.canary
        canary._switch.enabled = name == "on"
        canary.step.scrub.budget = ScrubBudget.parse(budget) if budget else self._budget
        self.session.lifetime._next = None
        for region in canary.regions:
            canary.slots.clear(region, None)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache can't be emptied")

    def generate_s(self, workload: tuple[int, ...], new: int, seed: int) -> float:
        """Seconds that it takes, with prompts that belong to the seed."""
        from vllm import SamplingParams

        rng = random.Random(seed)
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, self.vocabulary) for _ in range(workload[1])]}
            for _ in range(workload[0])
        ]
        params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def measure(self, name: str, workload: tuple[int, ...], arm: str, turn: int) -> dict[str, Any]:
        """One arm of one turn: seconds of prefill and decode: medians of the repetitions."""
        self.turn(arm)
        batch, prompt, new, repeats = workload
        if name.startswith("hit"):
            self.generate_s(workload, 1, turn)
            hits = [self.generate_s(workload, 1, turn) for _ in range(HITS)]
            return {"workload": name, "arm": arm, "turn": turn, "hits_s": 1 / statistics.median(hits)}
        prefill, decode, steps = [], [], []
        for repeat in range(repeats):
            seed = 1000 * turn + repeat
            prefill.append(self.generate_s(workload, 1, seed))
            if new > 1:
                self._ended.clear()
                decode.append(self.generate_s(workload, new, seed))
                steps += [later - earlier for earlier, later in itertools.pairwise(self._ended)]
        result = {"workload": name, "arm": arm, "turn": turn, "prefill_s": statistics.median(prefill)}
        result["prefill_tokens_s"] = batch * prompt / result["prefill_s"]
        if decode:
            result["decode_s"] = statistics.median(decode)
            result["decode_tokens_s"] = batch * new / result["decode_s"]
            result["steps_s"] = 1 / statistics.median(steps)
        return result

    def host(self, workload: tuple[int, ...], arm: str) -> str:
        """The host's time of `HITS` hits: functions of Canary, and those that it calls, by their own time."""
        self.turn(arm)
        self.generate_s(workload, 1, 999)
        recorder = cProfile.Profile()
        recorder.enable()
        for _ in range(HITS):
            self.generate_s(workload, 1, 999)
        recorder.disable()
        text = io.StringIO()
        stats = pstats.Stats(recorder, stream=text)
        stats.sort_stats("tottime").print_stats(16)
        stats.sort_stats("cumulative").print_stats("canary_", 24)
        return "\n".join(line for line in text.getvalue().splitlines() if line.strip())

    def profile(self, workload: tuple[int, ...], arm: str) -> str:
        """The GPU's time of a decode of 32 tokens, or of a hit: how long kernels of Canary and others ran, how long
        none did."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as record

        self.turn(arm)
        new = min(workload[2], 32)
        for _ in range(2):
            self.generate_s(workload, 1, 999)
        with record(activities=[ProfilerActivity.CUDA]) as profiler:
            self.generate_s(workload, new, 999)
        spans = sorted(
            (e.time_range.start, e.time_range.end, e.name)
            for e in profiler.events()
            if e.device_type == DeviceType.CUDA
        )
        spent: dict[str, list[float]] = {}
        idle, end = 0.0, spans[0][0]
        for first, last, name in spans:
            idle += max(0.0, first - end)
            end = max(end, last)
            spent.setdefault(name, []).append(last - first)
        lines = [f"{arm}: {(end - spans[0][0]) / 1000:.2f} ms, of which {idle / 1000:.2f} ms nothing ran"]
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
            if len(times) >= 4 or "_kernel" in name:
                lines.append(
                    f"  {sum(times) / 1000:9.3f} ms {len(times):6d} x {statistics.median(times):8.1f} us {name[:90]}"
                )
        return "\n".join(lines[:60])


def table(results: list[dict[str, Any]]) -> str:
    """Medians of each arm, and of the pairs' losses against ``off``."""
    lines = [f"{'workload':9} {'phase':8} {'arm':8} {'per s':>10} {'loss %':>8}  pairs, least to most"]
    for workload in dict.fromkeys(r["workload"] for r in results):
        for phase, key in PHASES.items():
            mine = [r for r in results if r["workload"] == workload and key in r]
            off = {r["turn"]: r[key] for r in mine if r["arm"] == "off"}
            for arm in dict.fromkeys(r["arm"] for r in mine):
                rates = [r[key] for r in mine if r["arm"] == arm]
                losses = sorted(
                    100 * (1 - r[key] / off[r["turn"]]) for r in mine if r["arm"] == arm and r["turn"] in off
                )
                loss = "" if arm == "off" else f"{statistics.median(losses):8.2f}  {losses[0]:.2f} to {losses[-1]:.2f}"
                lines.append(f"{workload:9} {phase:8} {arm:8} {statistics.median(rates):10.1f} {loss}")
    return "\n".join(lines)


def main() -> None:
    """Warms up, measures, tells."""
    args = arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    prepare(args)
    began = time.time()
    served = Served(args)
    print(f"up after {time.time() - began:.0f} s", flush=True)
    chosen = {n: w for n, w in (SMALL if args.device == "cpu" else WORKLOADS).items() if n in args.workloads.split(",")}
    chosen |= {f"hit {length}": (1, int(length), 1, 1) for length in filter(None, args.hits.split(","))}
    arms = args.arms.split(",")
    for arm in arms:
        for name, workload in chosen.items():
            served.measure(name, workload, arm, -1)
    print(f"warm after {time.time() - began:.0f} s", flush=True)
    results: list[dict[str, Any]] = []
    for turn in range(args.pairs):
        if time.time() - began > args.budget_s:
            break
        for name, workload in chosen.items():
            # To and fro, so that a drift falls on all arms alike.
            for arm in arms if turn % 2 == 0 else arms[::-1]:
                results.append(served.measure(name, workload, arm, turn))
        args.out.write_text("".join(json.dumps(r) + "\n" for r in results))
    if args.profile:
        for arm in arms:
            for name, workload in chosen.items():
                print(name, served.profile(workload, arm), flush=True)
                if name.startswith("hit"):
                    print(name, arm, served.host(workload, arm), flush=True)
    stats = {k: v for k, v in served.session.canary.stats().items() if v}
    args.out.write_text("".join(json.dumps(r) + "\n" for r in [*results, {"stats": stats}]))
    print(stats, flush=True)
    print(table(results), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
