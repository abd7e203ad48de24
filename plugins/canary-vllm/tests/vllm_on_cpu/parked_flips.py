"""Bits that flip in KV parked in the prefix cache, and what is answered from it. Prints a line of JSON for each mode.

python -m vllm_on_cpu.parked_flips COUNT [MODE ...] [clean] [ahead] [x8] [t2]

With ``clean`` nothing flips; with ``ahead``, asynchronous scheduling; with ``x8``, eight requests at a time; with
``t2``, answers of two tokens.
"""

import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from vllm_on_cpu import guarded
from vllm_on_cpu.engine import SmallEngine, as_asked_for

LENGTH, NEW_TOKENS = 80, 8
ROUND = 1000
"""Requests after which others are asked, of an engine guarded anew."""
BITS = (23, 28, 29, 30)
"""Of the exponent of a 32-bit float: a flip of a lower bit seldom changes a tiny model's answer."""


@dataclass
class Served:
    """``asked`` requests, ``flipped`` bits in what they hit; how many were answered ``right``, how many ``wrong``, how
    many ended with an ``error``; and how many were computed again."""

    asked: int = 0
    flipped: int = 0
    right: int = 0
    wrong: int = 0
    error: int = 0
    recomputed: int = 0
    findings: int = 0
    hit_blocks: int = 0


def serve(
    small: SmallEngine,
    count: int,
    mode: str,
    seed: int = 0,
    flips: bool = True,
    together: int = 1,
    new: int = NEW_TOKENS,
    **settings: Any,
) -> Served:
    """Flips one random bit of a random layer and half in a random block that the next request will hit, ``count``
    times. Found by vLLM's own lookup, flipped in its own tensors. Each right answer is one of an unguarded engine.
    Without ``flips`` nothing is broken. ``together``: so many requests are asked at a time.
    ``new``: tokens of each answer."""
    draw, served = random.Random(f"parked {seed}"), Served()
    prompts = [[draw.randrange(3, 500) for _ in range(LENGTH)] for _ in range(6)]
    small.renew()
    right = small.serve(prompts, new)
    settings = {"read_check": 0, "incident_limit": 1, "log_level": "error", **settings}
    with guarded.guard(small, on_violation=mode, **settings) as guard:
        small.serve(prompts, new, "first")
        for turn in range(0, count, together):
            asked = {f"q{i}": draw.randrange(len(prompts)) for i in range(turn, min(count, turn + together))}
            for name, number in asked.items():
                small.submit(name, prompts[number], new)
                # Where nothing of it is parked any more, the request parks it again.
                served.flipped += flips and flip_parked(small, name, draw)
            while small.step():
                pass
            for name, number in asked.items():
                ended, answer = small.ends.pop(name, None), small.answers.pop(name)
                served.asked += 1
                served.error += ended == "error"
                served.right += answer == right[number] and ended != "error"
                served.wrong += answer != right[number] and ended != "error"
        served.recomputed = len(guard.findings.told("recomputed"))
        guard.canary.drain()
        served.findings = len(guard.findings.violations)
        served.hit_blocks = int(guard.canary.stats().get("hit_blocks", 0))
    return served


def flip_parked(small: SmallEngine, request: str, draw: random.Random) -> bool:
    """Flips a bit in a block that waiting ``request`` will hit; False where there is none."""
    import torch

    manager = small.scheduler.kv_cache_manager
    found = manager.get_computed_blocks(small.scheduler.requests[request])
    blocks = [block.block_id for group in found[0].blocks for block in group if not block.is_null]
    if not blocks:
        return False
    tensor = draw.choice([tensor for _, tensor in small.tensors()]).view(torch.int32)
    block = tensor[draw.choice(blocks)]
    block[tuple(draw.randrange(size) for size in block.shape)] ^= 1 << draw.choice(BITS)
    return True


def main() -> None:
    """In one engine, one mode after the other; a line of sums after each `ROUND` requests."""
    words = sys.argv[2:]
    numbers = {word[0]: int(word[1:]) for word in words if word[1:].isdecimal()}
    size = {"together": numbers.get("x", 1), "new": numbers.get("t", NEW_TOKENS)}
    modes = [word for word in words if word.isalpha() and word not in ("clean", "ahead")] or ["report", "protect"]
    with as_asked_for():
        small = SmallEngine("llama", async_scheduling="ahead" in words)
    for mode in modes:
        sums, began, count = Counter[str](), time.monotonic(), int(sys.argv[1])
        for first in range(0, count, ROUND):
            part = {"seed": first // ROUND, "flips": "clean" not in words, **size}
            sums.update(asdict(serve(small, min(ROUND, count - first), mode, **part)))
            rate = round(sums["asked"] / (time.monotonic() - began), 1)
            sys.stdout.write(json.dumps({"mode": mode, **sums, "per_s": rate}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
