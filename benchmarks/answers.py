"""What a step costs that vLLM's lists of answers are compared (`AnswerLists`, `AnswerCheck`).

``python -m benchmarks.answers [cpu|cuda]``: 256 requests get one token a step; real `vllm.v1.request.Request` where
vLLM is installed, else stand-ins with its names. Rounds with and without the hooks take turns, and of each step the
fastest round counts: pickling to the workers is in it, and the forward itself is not.
"""

import pickle
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from canary_adapters import AnswerCheck, AnswerLists
from canary_core import Canary, CanaryConfig, KVSource, Region
from canary_core.records import SAMPLE_POSITION_BITS, SAMPLE_TOKEN_BITS, SAMPLE_TOKENS
from canary_kit.quiet import unheard

REQUESTS, PROMPT, STEPS, ROUNDS = 256, 100, 64, 20


def request(name: str) -> Any:
    """One request of a scheduler, with a prompt."""
    try:
        from vllm import SamplingParams
        from vllm.v1.request import Request
    except ImportError:
        tokens = [1] * PROMPT
        return SimpleNamespace(
            request_id=name, num_prompt_tokens=PROMPT, _all_token_ids=tokens, append_output_token_ids=tokens.append
        )
    return Request(
        request_id=name, prompt_token_ids=[1] * PROMPT, sampling_params=SamplingParams(), pooling_params=None
    )


class Served:
    """Requests of a scheduler, and a guarded worker that has sampled for them."""

    def __init__(self, device: str) -> None:
        pool = torch.zeros(REQUESTS + 1, 8, device=device)
        region = Region("kv", len(pool), (KVSource(pool, "k", 0, 32, 32, dtype=pool.dtype),))
        self.canary = Canary([region], CanaryConfig.load(scrub_budget="0"))
        self.canary.sampled.follow()
        self.requests = [request(f"request-{number}") for number in range(REQUESTS)]
        ids = [self.canary.writers.id(one.request_id) for one in self.requests]
        self.writers = torch.tensor(ids, device=device)
        self.samples = next(state.samples for state in self.canary.states.values() if state.samples is not None)
        known = {one.request_id: one for one in self.requests}
        self.lists = AnswerLists(lambda: self.requests, lambda: known)
        self.check = AnswerCheck(self.canary, self.canary.writers.known)

    def forward(self, token: int) -> None:
        """A forward has computed the tokens of the last step, and each request gets ``token`` next."""
        self.canary.step._forward.number += 1
        position = len(self.requests[0]._all_token_ids)
        for one in self.requests:
            one.append_output_token_ids(token)
        words = (self.writers << SAMPLE_POSITION_BITS | position) << SAMPLE_TOKEN_BITS | token
        self.samples.table.view(-1, SAMPLE_TOKENS)[self.writers, position % SAMPLE_TOKENS] = words

    def round(self, compared: bool) -> list[tuple[float, float]]:
        """Microseconds of each step, of the scheduler and of a worker."""
        spent = []
        for step in range(STEPS):
            self.forward(step)
            began = time.perf_counter()
            parts = self.lists.next(REQUESTS) if compared else None
            sent = None if parts is None else pickle.dumps(parts, protocol=5)
            between = time.perf_counter()
            if compared:
                self.check.take(None if sent is None else pickle.loads(sent))
            spent.append((1e6 * (between - began), 1e6 * (time.perf_counter() - between)))
        # The last lists are looked up while it is known what was sampled.
        self.forward(STEPS)
        self.check.take(None)
        return spent


def main() -> None:
    """Prints the mean step, of each step the fastest of all rounds."""
    torch.set_num_threads(1)
    with unheard():
        served = Served(sys.argv[1] if len(sys.argv) > 1 else "cpu")
        rounds = [(served.round(False), served.round(True)) for _ in range(ROUNDS)]
        stats = served.canary.stats()
        served.canary.close()
    for number, side in enumerate(("scheduler", "worker")):
        off, on = (
            sum(min(one[which][step][number] for one in rounds) for step in range(STEPS)) / STEPS for which in (0, 1)
        )
        print(f"{side}: {on - off:.1f} µs a step of {REQUESTS} requests")  # noqa: T201
    print({name: count for name, count in stats.items() if name.startswith("answer")})  # noqa: T201


if __name__ == "__main__":
    main()
