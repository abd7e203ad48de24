"""Bits that flip in KV parked for the next request, and what is answered from it. Prints a line of JSON for each mode.

python -m tiny.parked_flips ENGINE COUNT [MODE ...]

ENGINE: ``continuous`` (blocks of the prefix cache) or ``generate`` (a cache that is given to the next call). MODE: a
value of ``CANARY_ON_VIOLATION``, or ``clean``: protect, and no bit flips.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import canary_transformers
import torch
from canary_transformers.conformance.continuous import ContinuousSession
from canary_transformers.errors import WithheldError

from canary_core.testing import Findings
from tiny.generation import generate
from tiny.models import generating

LENGTH, NEW_TOKENS, PROMPTS = 36, 8, 4
BITS = (23, 28, 29, 30)
"""Of the exponent of a 32-bit float: a flip of a lower bit seldom changes a tiny model's answer."""
QUIET: dict[str, Any] = {"read_check": 0, "incident_limit": 1, "log_level": "error"}


@dataclass
class Served:
    """``asked`` requests, ``flipped`` bits in what they hit; how many were answered ``right``, how many ``wrong``, how
    many ended with an ``error``; how many were computed again; ``leaked`` blocks, free before and not after."""

    asked: int = 0
    flipped: int = 0
    right: int = 0
    wrong: int = 0
    error: int = 0
    recomputed: int = 0
    leaked: int = 0


def prompts(draw: random.Random, length: int = LENGTH) -> list[list[int]]:
    """Random ones."""
    return [[draw.randrange(3, 120) for _ in range(length)] for _ in range(PROMPTS)]


def continuous(count: int, mode: str, seed: int = 0, flips: bool = True, **settings: Any) -> Served:
    """Flips one random bit of a random layer and half in a random block that the next request will hit, ``count``
    times. Found by the engine's own lookup, flipped in its own tensor. Right is the answer of an unguarded engine."""
    draw, served = random.Random(f"parked {seed}"), Served()
    asked = prompts(draw)
    plain = ContinuousSession()
    right = [_answer(plain, f"plain-{n}", prompt) for n, prompt in enumerate(asked)]
    plain.close()
    session = ContinuousSession()
    findings = Findings()
    with canary_transformers.guard(session._model, on_violation=mode, **QUIET, **settings) as guard:
        guard.register(findings)
        before = None
        for turn in range(-PROMPTS, count):
            number = draw.randrange(PROMPTS) if turn >= 0 else turn + PROMPTS
            if turn >= 0:
                before = free_blocks(session) if before is None else before
                served.asked += 1
                served.flipped += flips and flip_parked(session, asked[number], draw)
            answer = _answer(session, f"q{turn}", asked[number])
            if turn >= 0:
                error = session.error(f"q{turn}")
                served.error += error is not None
                served.right += error is None and answer == right[number]
                served.wrong += error is None and answer != right[number]
        served.recomputed = len(findings.told("recomputed"))
        served.leaked = 0 if before is None else before - free_blocks(session)
    session.close()
    return served


def _answer(session: ContinuousSession, name: str, prompt: Sequence[int]) -> list[int]:
    session.submit(name, prompt, NEW_TOKENS)
    for _ in range(200):
        if not session.step():
            return list(session.answer(name))
    raise RuntimeError(f"{name} never ends")


def free_blocks(session: ContinuousSession) -> int:
    """Blocks that can be handed out: free, in a free sector, or kept for their content only."""
    cache = session._cache
    allocators = cache.cache_allocators.values()
    free = sum(cache.pool.count_free_blocks(a.index) + len(a.ledger.cached_blocks) for a in allocators)
    return free + cache.pool.num_free_sectors * next(iter(allocators)).blocks_per_sector


def flip_parked(
    session: ContinuousSession, prompt: Sequence[int], draw: random.Random, bits: Sequence[int] = BITS
) -> bool:
    """Flips a bit in a block that a request with ``prompt`` will hit; False where there is none."""
    allocator = next(iter(session._cache.cache_allocators.values()))
    blocks = allocator.match_prefix_blocks(list(prompt))
    if not blocks:
        return False
    block = session._cache.cache_tensor.view(-1, allocator.bytes_per_block)[draw.choice(blocks)].view(torch.int32)
    block[draw.randrange(block.shape[0])] ^= 1 << draw.choice(bits)
    return True


def generated(count: int, mode: str, seed: int = 0, flips: bool = True, **settings: Any) -> Served:
    """As `continuous`, for caches that the caller keeps from one answer of `generate()` and gives to the next."""
    draw, served = random.Random(f"parked {seed}"), Served()

    def act(cache: Any) -> None:
        if flips:
            flip(cache, draw)

    model = generating("llama")
    asked = [torch.tensor([prompt]) for prompt in prompts(draw)]
    right = [_first_and_rest(model, ids, lambda cache: None)[1] for ids in asked]
    with canary_transformers.guard(model, on_violation=mode, **QUIET, **settings):
        for _ in range(count):
            number = draw.randrange(PROMPTS)
            served.asked += 1
            served.flipped += flips
            try:
                _, answer = _first_and_rest(model, asked[number], act)
            except WithheldError:
                served.error += 1
                continue
            served.right += answer == right[number]
            served.wrong += answer != right[number]
    return served


def _first_and_rest(model: Any, ids: torch.Tensor, act: Callable[[Any], object]) -> tuple[Any, list[int]]:
    """A short answer, and one that goes on from its cache once ``act`` was done to the cache."""
    made = generate(model, ids, max_new_tokens=4, return_dict_in_generate=True)
    act(made.past_key_values)
    more = generate(model, made.sequences, max_new_tokens=NEW_TOKENS, cache=made.past_key_values)
    return made, more[0].tolist()


def flip(cache: Any, draw: random.Random) -> None:
    """Flips a bit of a random place."""
    layer = draw.choice(cache.layers)
    tensor = draw.choice([layer.keys, layer.values]).view(torch.int32)
    tensor[tuple(draw.randrange(size) for size in tensor.shape)] ^= 1 << draw.choice(BITS)


def main() -> None:
    """In one process, one mode after the other."""
    serve = {"continuous": continuous, "generate": generated}[sys.argv[1]]
    for mode in sys.argv[3:] or ("report", "protect"):
        clean = mode == "clean"
        served = serve(int(sys.argv[2]), "protect" if clean else mode, flips=not clean)
        sys.stdout.write(json.dumps({"mode": mode, **asdict(served)}) + "\n")


if __name__ == "__main__":
    main()
