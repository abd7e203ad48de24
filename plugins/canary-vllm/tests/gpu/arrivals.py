"""KV that a connector brings back to a real vLLM, under guard: hundreds of clean reloads are silent, and a bit flipped
in the connector's own memory is found at the next reload, with layer and half. No line of a connector is changed.

    python3 arrivals.py offload lmcache                    # one GPU; offload is vLLM's own host tier
    python3 arrivals.py example --device cpu               # vLLM's ExampleConnector, which stores to a disk

With LMCache 0.5.2 and vLLM 0.26.0 no reload is clean: the public bug LMCache#4463. There it is shown that the first
reload is told, naming the connector. Prints a row for each; raw results go to ``$OUT/arrivals-FEATURE.json``. Exits
with 1 if anything is not as it should be.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from typing import Any

import guard

EAGER = {"enforce_eager": True, "enable_prefix_caching": False}
STORE = guard.OUT / "example-store"
FEATURES: dict[str, dict[str, Any]] = {
    "offload": guard.FEATURES["offload"][1],
    "lmcache": guard.FEATURES["lmcache"][1],
    "simple": dict(
        EAGER,
        kv_transfer_config={
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 2 << 30},
        },
    ),
    "example": dict(
        EAGER,
        kv_transfer_config={
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(STORE)},
        },
    ),
}
"""Feature: what `vllm.LLM` is given."""
PROMPTS, ROUNDS, FLIPS = 8, 40, 6


def stored_row(worker: Any, layer: int, half: str, block: int, offset: int) -> bytes:
    """In a worker on a GPU: the bytes of one head of a token's K or V, by vLLM's own layout of the cache."""
    import re

    import torch

    runner = worker.model_runner
    for group in runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            if int(re.findall(r"\.(\d+)\.", name)[0]) == layer:
                cache = runner.compilation_config.static_forward_context[name].kv_cache
                size = cache.shape[3] // 2
                row = cache[block, 0, offset, size * (half == "v") :][:size]
                return bytes(row.contiguous().view(torch.uint8).cpu().numpy())
    raise LookupError(layer)


def host_tensors(worker: Any) -> list[Any]:
    """In a worker: tensors in host memory that the connector holds, found by walking its attributes."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo: list[Any] = [get_kv_transfer_group()]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or len(seen) > 100_000:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            if thing.device.type == "cpu" and thing.nbytes > 1 << 20:
                # Several views of one memory are one.
                found[thing.untyped_storage().data_ptr()] = thing
        elif isinstance(thing, dict):
            todo += list(thing.values())
        elif isinstance(thing, (list, tuple, set)):
            todo += list(thing)
        elif type(thing).__module__.startswith("vllm.") and hasattr(thing, "__dict__"):
            todo += list(vars(thing).values())
    return list(found.values())


def flip_in_host_memory(worker: Any, row: bytes, seed: int) -> int:
    """In a worker: flips one bit of ``row`` wherever the connector has these bytes; gives in how many places."""
    import torch

    rng = random.Random(seed)
    place, bit = rng.randrange(len(row)), 1 << rng.randrange(8)
    places = 0
    for tensor in host_tensors(worker):
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        memory = memoryview(flat.numpy())
        step = 64 << 20
        for first in range(0, len(memory), step):
            # What begins in the next part is found there.
            part = bytes(memory[first : first + step + len(row) - 1])
            at = part.find(row)
            while at >= 0:
                flat[first + at + place] ^= bit
                places += 1
                at = part.find(row, at + len(row))
    return places


class Reloads:
    """A guarded engine with a connector, and prompts that it serves again and again."""

    def __init__(self, feature: str) -> None:
        guard.FEATURES[feature] = ("llama", FEATURES[feature])
        self.feature = feature
        self.served = guard.Served(feature)
        config = self.served.llm.llm_engine.engine_core.engine_core.scheduler.vllm_config
        self.block = int(config.cache_config.block_size)

    def told(self) -> dict[str, Any]:
        """All that Canary has told, of all ranks together."""
        every = self.served.llm.collective_rpc(guard.told)
        return {
            "violations": [v for one in every for v in one["violations"]],
            "events": [e for one in every for e in one["events"]],
            "stats": every[0]["stats"],
        }

    def serve(self, prompts: list[list[int]]) -> list[list[int]]:
        """One round; the connector gets the time to store what it stores beside."""
        answers = self.served.generate(prompts, 8)
        time.sleep(0.05)
        return answers

    def clean(self, rounds: int) -> dict[str, Any]:
        """Prompts that are computed once and come back in every round; and one that is longer each time."""
        prompts = self.served.prompts(5, PROMPTS, 1200)
        first = self.serve(prompts)
        time.sleep(2)
        same = [self.serve(prompts) == first for _ in range(rounds)]
        return {"rounds": rounds, "same_tokens": sum(same), **self.told()}

    def flips(self) -> list[dict[str, Any]]:
        """Bits flipped in what the connector has stored: each is told at the next reload, or it isn't."""
        rng = random.Random(9)
        done = []
        for number in range(FLIPS):
            prompt = self.served.prompts(700 + number, 1, 1200)[0]
            # The first layer's V is the same wherever the token is; then its bytes would be found more than once.
            layer, half = rng.randrange(1, self.served.layers), rng.choice(self.served.halves)
            position = rng.randrange((len(prompt) - 1) // self.block * self.block)
            if self.feature == "example":
                self.serve([prompt])
                half, position, places = self.flip_file(layer, rng)
            else:
                row = self.row_of(f"flip-{number}", prompt, layer, half, position)
                time.sleep(2)
                places = sum(self.served.llm.collective_rpc(flip_in_host_memory, args=(row, number)))
            before = len(self.told()["violations"])
            self.serve([prompt])
            new = self.told()["violations"][before:]
            block = position // self.block * self.block
            right = [
                v
                for v in new
                if (v["kind"], v.get("layer"), v.get("half"), v.get("position")) == ("arrival", layer, half, block)
            ]
            done.append(
                {"layer": layer, "half": half, "position": position, "places": places, "found": len(right) == 1,
                 "others": [v for v in new if v not in right], "said": right[0]["explanation"] if right else None}
            )  # fmt: skip
        return done

    def row_of(self, name: str, prompt: list[int], layer: int, half: str, position: int) -> bytes:
        """Serves ``prompt``, and gives what the pool had of one head of the token at ``position`` while it ran."""
        from vllm import SamplingParams

        engine = self.served.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while any(len(r.output_token_ids) < 2 for r in scheduler.requests.values()):
            engine.step()
        request = next(iter(scheduler.requests.values()))
        block = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][position // self.block]
        arguments = (layer, half, block, position % self.block)
        row: bytes = self.served.llm.collective_rpc(stored_row, args=arguments)[0]
        while engine.has_unfinished_requests():
            engine.step()
        return row

    def flip_file(self, layer: int, rng: random.Random) -> tuple[str, int, int]:
        """Flips a bit in the newest file of ``layer``; gives half and position of what the bytes are in the pool."""
        import safetensors.torch
        import torch

        files = sorted(STORE.glob(f"*/*.{layer}.*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
        kept = safetensors.torch.load_file(files[-1])["kv_cache"]
        token, head, element = (rng.randrange(n) for n in kept.shape)
        kept.view({2: torch.int16, 4: torch.int32}[kept.element_size()])[token, head, element] ^= 1 << rng.randrange(9)
        safetensors.torch.save_file({"kv_cache": kept}, files[-1])
        inside, size = token % self.block, kept.shape[2] // 2
        if guard.DEVICE != "cpu":
            return ("k" if element < size else "v"), token, 1
        # On a CPU K of a block comes before its V, whatever the tensor's shape says.
        half = "k" if inside * 2 * size + element < self.block * size else "v"
        return half, token // self.block * self.block, 1


def child(feature: str, rounds: int) -> None:
    """One engine in this process: its results as a file."""
    shutil.rmtree(STORE, ignore_errors=True)
    reloads = Reloads(feature)
    result: dict[str, Any] = {"clean": reloads.clean(1 if feature == "lmcache" else rounds)}
    if feature != "lmcache":
        result["flips"] = reloads.flips()
    result["end"] = reloads.told()
    (guard.OUT / f"arrivals-{feature}.json").write_text(json.dumps(result))
    print("DONE", flush=True)
    # LMCache's threads keep the process alive.
    os._exit(0)


def run(feature: str, args: argparse.Namespace) -> dict[str, Any]:
    """One engine in a process of its own; a row of the table."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_")} | guard.ENVIRONMENT
    environment |= guard.LMCACHE if feature == "lmcache" else {}
    path = [str(guard.entry_point_folder()), str(guard.HERE), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "GUARD_DEVICE": args.device}
    environment |= {"OUT": str(guard.OUT), "CANARY_PLUGINS": "vllm,guard_witness"}
    # It stores to a folder that is emptied before.
    environment |= {"CANARY_LEDGER_PRIVATE": "ExampleConnector"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"} if args.device == "cpu" else {}
    given = {k: v for k, v in os.environ.items() if k.startswith("CANARY_")}
    environment = {**environment, **given, "CANARY_PLUGINS": environment["CANARY_PLUGINS"]}
    file = guard.OUT / f"arrivals-{feature}.json"
    file.unlink(missing_ok=True)
    log = guard.OUT / f"arrivals-{feature}.log"
    with log.open("w") as out:
        command = [sys.executable, __file__, feature, "--child", "--rounds", str(args.rounds)]
        try:
            subprocess.run(command, stdout=out, stderr=out, env=environment, timeout=args.limit_s, check=False)
        except subprocess.TimeoutExpired:
            print(f"{feature}: no end after {args.limit_s} s", flush=True)
    if not file.exists():
        print(log.read_text(errors="replace")[-3000:], flush=True)
        return {"feature": feature, "ok": False, "failed": "the engine did not come to its end; see above"}
    return judge(feature, json.loads(file.read_text()))


def judge(feature: str, result: dict[str, Any]) -> dict[str, Any]:
    """What it came to."""
    clean, flips = result["clean"], result.get("flips", [])
    ledger = {k: v for k, v in result["end"]["stats"].items() if k.startswith("ledger_")}
    told = clean["violations"]
    row: dict[str, Any] = {
        "feature": feature,
        "reloads": clean["rounds"] * PROMPTS,
        "same_tokens": f"{clean['same_tokens']}/{clean['rounds']} rounds",
        "told_on_clean_reloads": len(told),
        "flips": f"{sum(f['found'] for f in flips)}/{len(flips)}",
        "others": sum(len(f["others"]) for f in flips),
        "ledger": ledger,
        "bad_events": [e for e in result["end"]["events"] if e["level"] in ("error", "warning")][:4],
        "said": next((f["said"] for f in flips if f["said"]), None),
    }
    if feature == "lmcache":
        arrivals = [v for v in told if v["kind"] == "arrival"]
        row["said"] = arrivals[0]["explanation"] if arrivals else None
        row["ok"] = bool(arrivals) and all(v["origin"] == "LMCacheConnectorV1" for v in arrivals)
        return row
    row["first_told"] = told[:2]
    row["flip_list"] = flips
    found = all(f["found"] and not f["others"] for f in flips)
    row["ok"] = not told and found and ledger.get("ledger_matched", 0) > clean["rounds"] * PROMPTS
    return row


def main() -> None:
    """All features that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="+", choices=[*FEATURES])
    parser.add_argument("--device", default=guard.DEVICE, choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often all prompts come back")
    parser.add_argument("--limit-s", type=int, default=400, help="most seconds of one engine")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    guard.OUT.mkdir(parents=True, exist_ok=True)
    if args.child:
        child(args.features[0], args.rounds)
        return
    rows = [run(feature, args) for feature in args.features]
    for row in rows:
        print(json.dumps(row, indent=1), flush=True)
    for row in rows:
        print(f"{row['feature']}: {'as it should be' if row['ok'] else 'NOT as it should be'}", flush=True)
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
