"""Throughput of a real SGLang engine, random weights and CUDA graphs: off, SGLang's built-in canary, ours, in one call.

    python3 overhead.py                                             # Llama-8B shape, 64 x (1024 in, 256 out)
    python3 overhead.py --batch 1 --prompt-tokens 8000 --new-tokens 16 --chunked-prefill-size 8192   # one long prompt
    python3 overhead.py --configs off,ours --layers 2 --tiny        # a quick check that everything runs

One engine at a time, each in a process of its own (engine start 25-45 s). Prints a line ``RESULT {json}`` a repetition
and ``SUMMARY {json}`` lines at the end: medians, and the share lost against ``off``. ``--rounds`` goes through the
configurations several times, so that drift of the machine falls on all of them. What the engines say goes to
``--log-folder``, since children of a killed engine keep pipes open; Canary's own events are counted from there.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

CONFIGS = {
    "off": {},
    "builtin": {"kv_canary": "log", "kv_canary_real_data": "none"},
    "builtin-all": {"kv_canary": "log", "kv_canary_real_data": "all"},
    "ours": {},
    "ours-bytes-off": {},
    "ours-scrub-off": {},
}
ENVIRONMENT = {
    "ours": {"CANARY_PLUGINS": "sglang"},
    "ours-bytes-off": {"CANARY_PLUGINS": "sglang", "CANARY_BYTES": "off"},
    "ours-scrub-off": {"CANARY_PLUGINS": "sglang", "CANARY_SCRUB_BUDGET": "0"},
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default="off,builtin,builtin-all,ours", help=f"of {', '.join(CONFIGS)}")
    parser.add_argument("--rounds", type=int, default=1, help="engines a configuration")
    parser.add_argument("--reps", type=int, default=3, help="repetitions an engine")
    parser.add_argument("--batch", type=int, default=64, help="requests at once")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--chunked-prefill-size", type=int, default=None)
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--mem-fraction", type=float, default=0.6)
    parser.add_argument("--tiny", action="store_true", help="a model of a few MB instead of Llama-8B's shape")
    parser.add_argument("--device", default="cuda", help="cpu: for a check that the script runs, without graphs")
    parser.add_argument("--timeout-s", type=int, default=400, help="most seconds an engine may take")
    parser.add_argument("--log-folder", type=Path, default=Path("/tmp/canary-overhead"))
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def model_config(args: argparse.Namespace) -> dict[str, object]:
    """Llama-8B's shape, or one that a CPU can serve."""
    sizes = dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=128256,
    )  # fmt: skip
    tiny = dict(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=512
    )  # fmt: skip
    return dict(
        architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=args.layers,
        max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu",
        tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2,
        **(tiny if args.tiny else sizes),
    )  # fmt: skip


def serve(args: argparse.Namespace) -> None:
    """One engine of configuration ``args.child``: prints its RESULT lines."""
    import sglang

    config = model_config(args)
    folder = args.log_folder / f"model-{config['hidden_size']}-{args.layers}"
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("config.json").write_text(json.dumps(config))
    options = dict(CONFIGS[args.child])
    if args.chunked_prefill_size is not None:
        options["chunked_prefill_size"] = args.chunked_prefill_size
    if args.device == "cpu":
        options |= dict(device="cpu", disable_cuda_graph=True, max_total_tokens=4096, mem_fraction_static=0.05)
    else:
        options |= dict(
            mem_fraction_static=args.mem_fraction, cuda_graph_max_bs_decode=128, cuda_graph_backend_prefill="disabled"
        )
    started = time.time()
    engine = sglang.Engine(
        model_path=str(folder), load_format="dummy", skip_tokenizer_init=True, grammar_backend="none",
        sampling_backend="pytorch", attention_backend=args.attention_backend, log_level="error", random_seed=1,
        **options,
    )  # fmt: skip
    start_s = time.time() - started

    def generate(batch: int, prompt: int, new: int, seed: int) -> float:
        rng = random.Random(seed)
        most = 500 if args.tiny else 100_000
        ids = [[rng.randrange(10, most) for _ in range(prompt)] for _ in range(batch)]
        start = time.time()
        engine.generate(input_ids=ids, sampling_params=dict(max_new_tokens=new, temperature=0, ignore_eos=True))
        return time.time() - start

    # Twice, as kernels of every batch size on the way are compiled by the first one.
    for seed in (1, 2):
        generate(args.batch, args.prompt_tokens, min(16, args.new_tokens), seed)
    for rep in range(args.reps):
        prefill_s = generate(args.batch, args.prompt_tokens, 1, 100 + rep)
        total_s = generate(args.batch, args.prompt_tokens, args.new_tokens, 200 + rep)
        result = {
            "config": args.child,
            "rep": rep,
            "prefill_s": round(prefill_s, 5),
            "prefill_tokens_s": round(args.batch * args.prompt_tokens / prefill_s, 1),
            "decode_tokens_s": round(args.batch * (args.new_tokens - 1) / (total_s - prefill_s), 1),
            "start_s": round(start_s, 1),
        }
        print("RESULT " + json.dumps(result), flush=True)
    engine.shutdown()


def run(config: str, log: Path, timeout_s: int) -> list[dict[str, float]]:
    """One engine in a process of its own; its results, also of one that had to be ended."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_")}
    environment |= {"CANARY_LOG_FORMAT": "json", "CANARY_STATS_INTERVAL": "200", **ENVIRONMENT.get(config, {})}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--child", config], stdout=out, stderr=out, env=environment
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{config}: ended after {timeout_s} s; see {log}", flush=True)
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("RESULT ")]


def canary_events(log: Path) -> dict[str, object]:
    """Canary's events of one engine: how many of each name, and the last counters."""
    names: Counter[str] = Counter()
    stats: dict[str, object] = {}
    for line in log.read_text(errors="replace").splitlines():
        if not line.startswith("{") or '"logger": "canary"' not in line:
            continue
        event = json.loads(line)
        names[event["event"]] += 1
        if event["event"] == "stats":
            stats = {k: v for k, v in event.items() if isinstance(v, int)}
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
    results: dict[str, list[dict[str, float]]] = {c: [] for c in configs}
    for number in range(args.rounds):
        for config in configs:
            log = args.log_folder / f"{config}-{number}.log"
            done = run(config, log, args.timeout_s)
            results[config] += done
            for result in done:
                print("RESULT " + json.dumps({**result, "round": number}), flush=True)
            if not done:
                print(f"{config}: no result; the end of {log}:\n{log.read_text(errors='replace')[-2000:]}", flush=True)
            if config.startswith("ours"):
                print("CANARY " + json.dumps({"config": config, "round": number, **canary_events(log)}), flush=True)
    for config in configs:
        summary: dict[str, object] = {"config": config, "repetitions": len(results[config])}
        for key in ("prefill_tokens_s", "decode_tokens_s"):
            if not results[config]:
                continue
            summary[key] = middle = statistics.median(r[key] for r in results[config])
            if results.get("off"):
                off = statistics.median(r[key] for r in results["off"])
                summary[f"{key}_lost_percent"] = round(100 * (1 - middle / off), 2)
        print("SUMMARY " + json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
