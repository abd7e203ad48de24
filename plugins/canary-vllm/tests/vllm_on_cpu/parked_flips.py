"""Bits that flip in KV parked in the prefix cache, and what is answered from it. Prints a line of JSON for each mode.

python -m vllm_on_cpu.parked_flips COUNT [MODE ...]
"""

import json
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

from vllm_on_cpu import guarded
from vllm_on_cpu.engine import SmallEngine

LENGTH, NEW_TOKENS = 80, 8
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


def serve(small: SmallEngine, count: int, mode: str, seed: int = 0, **settings: Any) -> Served:
    """Flips one random bit of a random layer and half in a random block that the next request will hit, ``count``
    times. Found by vLLM's own lookup, flipped in its own tensors. Each right answer is one of an unguarded engine."""
    draw, served = random.Random(f"parked {seed}"), Served()
    prompts = [[draw.randrange(3, 500) for _ in range(LENGTH)] for _ in range(6)]
    small.renew()
    right = small.serve(prompts, NEW_TOKENS)
    settings = {"read_check": 0, "incident_limit": 1, "log_level": "error", **settings}
    with guarded.guard(small, on_violation=mode, **settings) as guard:
        small.serve(prompts, NEW_TOKENS, "first")
        for turn in range(count):
            number = draw.randrange(len(prompts))
            small.submit(f"q{turn}", prompts[number], NEW_TOKENS)
            # Where nothing of it is parked any more, the request parks it again.
            flipped = flip_parked(small, f"q{turn}", draw)
            while small.step():
                pass
            served.asked += 1
            served.flipped += flipped
            ended, answer = small.ends.get(f"q{turn}"), small.answers[f"q{turn}"]
            served.error += ended == "error"
            served.right += answer == right[number] and ended != "error"
            served.wrong += answer != right[number] and ended != "error"
        served.recomputed = len(guard.findings.told("recomputed"))
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
    """In one engine, one mode after the other."""
    small = SmallEngine("llama")
    for mode in sys.argv[2:] or ("report", "protect"):
        told = asdict(serve(small, int(sys.argv[1]), mode))
        sys.stdout.write(json.dumps({"mode": mode, **told}) + "\n")


if __name__ == "__main__":
    main()
