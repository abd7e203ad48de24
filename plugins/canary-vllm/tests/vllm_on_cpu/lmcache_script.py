"""A guarded vLLM on a CPU beside a server of LMCache, both as they are installed. Prints one line of JSON.

python -m vllm_on_cpu.lmcache_script PORT MEMORY MODE

``PORT``: the server's. ``MEMORY``: the file in which it has what it stores. ``MODE``: who copies, as LMCache names it.
"""

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONNECTOR = "LMCacheMPConnector"
ROUNDS = 20
Block = Mapping[str, bytes]
"""Bytes by vLLM's name of the layer."""


class Served:
    """Requests one after the other, and what vLLM's pool has of each while it runs."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def blocks(self, name: str, prompt: Sequence[int]) -> tuple[int, list[Block]]:
        """Serves ``prompt``: how many of its tokens LMCache brought, and its complete blocks, read from vLLM's own
        tensors by vLLM's own table."""
        import torch

        from vllm_on_cpu.engine import BLOCK

        self.engine.submit(name, prompt, 6)
        # vLLM gives it away with the first token.
        stats = self.engine.scheduler.requests[name].prefill_stats
        while len(self.engine.answers[name]) < 2:
            self.engine.step()
        held = [
            {layer: cache[block].contiguous().view(torch.uint8).numpy().tobytes() for layer, cache in self.layers()}
            for block in self.engine.blocks(name)[0][: len(prompt) // BLOCK]
        ]
        while self.engine.step():
            pass
        return int(stats.num_external_cached_tokens), held

    def layers(self) -> list[tuple[str, Any]]:
        """Those that have KV, in order."""
        return sorted((name, cache) for name, cache in self.engine.tensors() if cache is not None)


def replace(memory: Path, row: bytes, by: bytes) -> int:
    """Writes ``by`` wherever LMCache's memory has ``row``; gives in how many places."""
    stored = memory.read_bytes()
    places, at = 0, stored.find(row)
    with memory.open("r+b") as file:
        while at >= 0:
            file.seek(at)
            file.write(by)
            places, at = places + 1, stored.find(row, at + len(row))
    return places


def main() -> None:
    """Clean reloads; then, for K and V of each layer, one with a bit flipped in LMCache's own memory."""
    port, memory, mode = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    from canary_vllm.hooks import HOOKS

    from canary_core import CanaryConfig, hook_manager
    from canary_core.testing import Findings
    from vllm_on_cpu.engine import BLOCK, SmallEngine
    from vllm_on_cpu.guarded import Guarded

    findings = Findings()
    hook_manager().register(findings)
    # Only this engine stores with that server. LMCache learns where the cache is once: it is guarded from the start.
    HOOKS.start(CanaryConfig.load(read_check=-1, scrub_budget="0", stats_interval=0, ledger_private=CONNECTOR))
    extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port, "lmcache.mp.mp_transfer_mode": mode}
    connector = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    engine = SmallEngine("llama", num_gpu_blocks_override=64, kv_transfer_config=connector, enable_prefix_caching=False)
    guard, served = Guarded(engine, findings), Served(engine)
    # No token twice: the first layer's V of a token is the same wherever it is.
    tokens = random.Random(4).sample(range(3, 500), 480)
    asked = [tokens[:140], tokens[140:300], tokens[300:480]]
    first = [served.blocks(f"first{i}", prompt) for i, prompt in enumerate(asked)]
    answers = [engine.answers[f"first{i}"] for i in range(len(asked))]
    told: dict[str, Any] = {"at_first": sum(brought for brought, _ in first), "blocks": 0, "other": 0, "same": []}
    for turn in range(ROUNDS):
        for i, prompt in enumerate(asked):
            name = f"again{turn}-{i}"
            brought, held = served.blocks(name, prompt)
            told["blocks"] += brought // BLOCK
            told["other"] += sum(a != b for a, b in zip(held, first[i][1], strict=True))
            told["same"].append(engine.answers[name] == answers[i])
    told["trouble"] = guard.trouble()
    told["clean"] = {k: v for k, v in guard.canary.stats().items() if k.startswith("ledger_")}
    told["flips"] = []
    for number, (layer, half) in enumerate((layer, half) for layer in range(2) for half in "kv"):
        prompt, was = asked[number % 3], first[number % 3][1]
        name = served.layers()[layer][0]
        # In vLLM's CPU attention K of a head's block comes before its V; a row is of one element, or of one token.
        head = was[number][name][: len(was[number][name]) // 2]
        row = head[:128] if half == "k" else head[len(head) // 2 :][:128]
        flipped = bytes((*row[:5], row[5] ^ 4, *row[6:]))
        places = replace(memory, row, flipped)
        before = len(findings.violations)
        _, held = served.blocks(f"flip{number}", prompt)
        replace(memory, flipped, row)
        guard.canary.drain()
        new = findings.violations[before:]
        told["flips"].append(
            {
                "flipped": [layer, half, number * BLOCK],
                "places": places,
                "other": [
                    (block, n)
                    for block, (old, now) in enumerate(zip(was, held, strict=True))
                    for n in old
                    if old[n] != now[n]
                ],
                "layer": name,
                "found": [[v.kind.name, v.layer, v.half, v.position, v.origin] for v in new],
                "said": [v.explanation for v in new],
            }
        )  # fmt: skip
    print(json.dumps(told))
    sys.stdout.flush()
    for left in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
        left.unlink()
    # LMCache's threads keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main()
