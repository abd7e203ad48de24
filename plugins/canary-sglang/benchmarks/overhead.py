"""What a KV canary costs a real SGLang engine: none, SGLang's own, ours; random weights, CUDA graphs, one call.

    python3 overhead.py --out overhead.jsonl              # all four engines, both workloads
    python3 overhead.py --configs ours --arms off,on,on@0.2%,on@0    # how much of it is the scrub
    python3 overhead.py --model window                    # Cohere2: a full pool and one of a sliding window
    python3 overhead.py --small --device cpu --configs ours,off      # a check that the script runs

Two workloads: 64 requests of 1024 tokens that give 256 each, and one prompt of 8000 tokens alone. One engine at a time,
each in processes of its own. In the engine ``ours`` Canary is switched off and on between repetitions, which serve the
same prompts in turns (`overhead_switch`), so drift of the machine and differences between engines fall out: its loss is
that of pairs. The other engines are compared with ``off`` by their medians.

Time on an H200 that has run an engine before: start 25-45 s an engine; a turn of the first workload 1.5 (not measured)
+ 1.5 + 2.4 s, of the second 4 x 0.25 s (0.42 s under SGLang's canary with bytes). ``ours`` takes 45 + 12 to warm up +
8 turns x 2 arms x 6.6 = 163 s, each other engine 45 + 8 + 5 x 6.6 = 86 s: 7 minutes in all; a third arm adds 60 s. The
first engine on a machine starts 60-90 s later.
``--budget-s`` ends it before a limit; what was measured by then is reported.

Results go to ``--out``, a JSON object a line; the last thing printed is a table. Engines talk into ``--log-folder``,
since children of a killed engine keep pipes open.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from workloads import CONFIGS, MODELS, OFF, ON, SMALL, WORKLOADS, Workload, model_config, server_args

HERE = Path(__file__).parent


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default=",".join(CONFIGS), help=f"of {', '.join(CONFIGS)}")
    parser.add_argument("--arms", default=f"{OFF},{ON}", help="of engine ours: off, on, on@<scrub budget>")
    parser.add_argument("--workloads", default="batch,prompt")
    parser.add_argument("--model", default=MODELS[0], choices=MODELS, help="window: sliding layers, two pools")
    parser.add_argument(
        "--pairs", type=int, default=8, help="turns of the engine ours through its arms, first workload"
    )
    parser.add_argument("--reps", type=int, default=5, help="repetitions of the other engines, first workload")
    parser.add_argument("--small", action="store_true", help="a tiny model and little traffic")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--budget-s", type=int, default=560, help="most seconds in all")
    parser.add_argument("--out", type=Path, default=Path("overhead.jsonl"))
    parser.add_argument("--log-folder", type=Path, default=Path("/tmp/canary-overhead"))
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


class Served:
    """A running engine, and its switch where it has one."""

    def __init__(self, config: str, args: argparse.Namespace) -> None:
        import sglang

        model = args.log_folder / f"{args.model}-{'tiny' if args.small else '8b'}"
        model.mkdir(parents=True, exist_ok=True)
        model.joinpath("config.json").write_text(json.dumps(model_config(args.model, args.small)))
        self._vocabulary = 500 if args.small else 100_000
        options = server_args(args.device == "cpu") | CONFIGS[config].options
        self._engine = sglang.Engine(model_path=str(model), **options)
        switch = os.environ.get("OVERHEAD_SWITCH")
        self._switch = Path(switch) if switch else None

    def turn(self, arm: str) -> None:
        """Switches, and empties the cache in either case."""
        if self._switch is not None:
            (self._switch / "arm").write_text(arm)
            (self._switch / "applied").unlink(missing_ok=True)
            os.kill(int((self._switch / "pid").read_text()), signal.SIGUSR2)
            deadline = time.time() + 20
            while not (self._switch / "applied").exists() or (self._switch / "applied").read_text() != arm:
                if time.time() > deadline:
                    raise RuntimeError(f"the engine did not switch to {arm}; is overhead_switch loaded?")
                time.sleep(0.002)
        # Refused while the last request is being cleaned up.
        for _ in range(100):
            if getattr(self._engine.flush_cache(), "success", True):
                return
            time.sleep(0.02)
        raise RuntimeError("the cache can't be flushed")

    def generate_s(self, workload: Workload, new_tokens: int, seed: int) -> float:
        """Seconds that the workload takes, with prompts that belong to the seed."""
        rng = random.Random(seed)
        prompts = [
            [rng.randrange(10, self._vocabulary) for _ in range(workload.prompt_tokens)] for _ in range(workload.batch)
        ]
        sampling = dict(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        started = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - started

    def measure(self, workload: Workload, arm: str, turn: int) -> Iterator[dict[str, Any]]:
        """Repetitions from an empty cache, after one that isn't measured: a flush gives the device's memory back. Each
        is all prompts with one new token each, then the same prompts, cached now, with all new tokens: nearly nothing
        but decode, timed by itself and not as a difference."""
        self.turn(arm)
        self.generate_s(workload, 1, 10_000 + turn)
        for repeat in range(workload.repeats):
            number = turn * workload.repeats + repeat
            prefill_s = self.generate_s(workload, 1, 20_000 + number)
            result = {
                "workload": workload.name, "label": str(workload), "arm": arm, "turn": number,
                "prefill_s": round(prefill_s, 6),
                "prefill_tokens_s": round(workload.batch * workload.prompt_tokens / prefill_s, 2),
            }  # fmt: skip
            if workload.new_tokens > 1:
                decode_s = self.generate_s(workload, workload.new_tokens, 20_000 + number)
                rate = workload.batch * workload.new_tokens / decode_s
                result |= {"decode_s": round(decode_s, 6), "decode_tokens_s": round(rate, 2)}
            yield result
        if self._switch is not None and workload.new_tokens > 1:
            # Switching to the same arm tells of the steps since the last time.
            self.turn(arm)
            step_s = json.loads((self._switch / "steps").read_text().splitlines()[-1])["step_s"]
            yield {"workload": workload.name, "arm": arm, "turn": turn, "steps_s": round(1 / step_s, 4)}

    def close(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()


def serve(args: argparse.Namespace) -> None:
    """One engine of configuration ``args.child``: prints its RESULT lines."""
    started = time.time()
    engine = Served(args.child, args)
    print("RESULT " + json.dumps({"config": args.child, "start_s": round(time.time() - started, 1)}), flush=True)
    arms = args.arms.split(",") if args.child == "ours" else [OFF]
    turns = args.pairs if args.child == "ours" else args.reps
    workloads = [w for w in (SMALL if args.small else WORKLOADS) if w.name in args.workloads.split(",")]
    # Kernels are compiled for batch sizes on the way, so each workload runs whole, and once more.
    for arm in arms:
        for workload in workloads:
            for new_tokens in (workload.new_tokens, 1):
                engine.turn(arm)
                engine.generate_s(workload, new_tokens, 1)
    for turn, workload in itertools.product(range(turns), workloads):
        # To and fro, so that a drift falls on all arms alike.
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            for result in engine.measure(workload, arm, turn):
                print("RESULT " + json.dumps({"config": args.child, **result}), flush=True)
    engine.close()


def install_switch(folder: Path) -> dict[str, str]:
    """Makes `overhead_switch` known as a plugin to processes with the environment that this gives."""
    info = folder / "overhead_switch-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: overhead_switch\nVersion: 0\n")
    info.joinpath("entry_points.txt").write_text("[canary]\noverhead_switch = overhead_switch\n")
    for name in ("pid", "arm", "applied", "steps"):
        (folder / name).unlink(missing_ok=True)
    path = [str(folder), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {"OVERHEAD_SWITCH": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, path))}


def run(config: str, args: argparse.Namespace, limit_s: float) -> list[dict[str, Any]]:
    """One engine in processes of its own; its results, also of one that had to be ended."""
    log = args.log_folder / f"{config}.log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_") or config == "ours"}
    environment |= {"CANARY_LOG_FORMAT": "json", "CANARY_STATS_INTERVAL": "200"} if config == "ours" else {}
    environment |= CONFIGS[config].environment
    if config == "ours":
        environment |= install_switch(args.log_folder / "switch")
    started = time.time()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--child", config],
            stdout=out, stderr=out, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        # What is left of its process group, whoever ended the engine.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = log.read_text(errors="replace")
    results = [json.loads(line.partition(" ")[2]) for line in text.splitlines() if line.startswith("RESULT ")]
    print(f"{config}: {len(results)} results in {time.time() - started:.0f} s, exit code {code}", flush=True)
    if code != 0:
        print(f"the end of {log}:\n{text[-3000:]}", flush=True)
    if config == "ours":
        results.append({"config": config, **canary_events(text)})
    return results


def canary_events(log: str) -> dict[str, Any]:
    """Canary's events of one engine: how many of each name, and the last counters."""
    names: Counter[str] = Counter()
    stats: dict[str, Any] = {}
    for line in log.splitlines():
        if '"logger": "canary"' not in line or "{" not in line:
            continue
        event = json.loads(line[line.index("{") :])
        names[event["event"]] += 1
        if event["event"] == "stats":
            stats = {k: v for k, v in event.items() if isinstance(v, (int, float))}
    return {"events": dict(names), "stats": stats}


def main() -> None:
    """All configurations, one after the other."""
    args = arguments()
    if args.child is not None:
        serve(args)
        return
    configs = args.configs.split(",")
    unknown = [c for c in configs if c not in CONFIGS]
    if unknown:
        raise SystemExit(f"unknown configurations {unknown}; known are {', '.join(CONFIGS)}")
    args.log_folder.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + args.budget_s
    results: list[dict[str, Any]] = []
    for config in configs:
        left_s = max(deadline - time.time(), 1)
        # An engine that hangs leaves time for the others.
        results += run(config, args, left_s if config == configs[-1] else min(left_s, 330))
        args.out.write_text("".join(json.dumps(result) + "\n" for result in results))
    print(report.overhead(results), flush=True)


if __name__ == "__main__":
    main()
