"""Bits that flip in KV parked in the prefix cache, while another request runs, and what is answered from it later.
Prints a line of JSON.

python -m tiny.repaired_flips COUNT [on | off] [MODE]

``on``: with ``CANARY_REPAIR``, the default. MODE: a value of ``CANARY_ON_VIOLATION``, ``report`` by default.
"""

import json
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

import canary_transformers
import torch
from canary_transformers.conformance.continuous import ContinuousSession

from canary_core.testing import Findings
from tiny.parked_flips import QUIET, _answer, flip_parked

PROMPT, OTHER = ([random.Random(name).randrange(3, 120) for _ in range(30)] for name in ("prompt", "other"))


@dataclass
class Repaired:
    """``flipped`` bits; how many were ``told`` as a finding and as ``repaired``; how often the bytes were those of
    before at the end of the other request (``intact``), and the answer of a request that hits them ``right``; how many
    times something was evicted because of a finding."""

    flipped: int = 0
    told: int = 0
    repaired: int = 0
    intact: int = 0
    right: int = 0
    quarantined: int = 0


def flips(count: int, repair: bool = True, mode: str = "report", seed: int = 0) -> Repaired:
    """Flips ``count`` bits, one after the other, by the engine's own lookup and in its own tensor: any bit of any word.
    After each another prompt is served, and then the one whose KV it is. Where the bit stays, it is flipped back from
    outside, so that each turn begins with intact KV."""
    draw, done = random.Random(f"repaired {seed}"), Repaired()
    plain = ContinuousSession()
    right = _answer(plain, "plain", PROMPT)
    plain.close()
    session, findings = ContinuousSession(), Findings()
    settings: dict[str, Any] = {**QUIET, "on_violation": mode, "repair": repair, "scrub_budget": "1MiB"}
    with canary_transformers.guard(session._model, **settings) as guard:
        guard.register(findings)
        _answer(session, "first", PROMPT)
        allocator = next(iter(session._cache.cache_allocators.values()))
        memory = session._cache.cache_tensor.view(-1, allocator.bytes_per_block)
        for turn in range(count):
            blocks = allocator.match_prefix_blocks(list(PROMPT))
            intact = memory[blocks].clone()
            done.flipped += flip_parked(session, PROMPT, draw, range(32))
            _answer(session, f"other {turn}", OTHER)
            same = torch.equal(memory[blocks], intact)
            done.intact += same
            done.right += _answer(session, f"hit {turn}", PROMPT) == right
            if not same:
                memory[blocks] = intact
        done.told = len(findings.violations)
        done.repaired, done.quarantined = len(findings.told("repaired")), len(findings.told("quarantined"))
    session.close()
    return done


def main() -> None:
    """In one process."""
    count, *given = sys.argv[1:]
    repair, mode = (*given, *("on", "report")[len(given) :])
    sys.stdout.write(json.dumps(asdict(flips(int(count), repair == "on", mode))) + "\n")


if __name__ == "__main__":
    main()
