"""Canary's own host time for a request that hits a cached prefix, by function: until its first token, and after it.

    CANARY_ON_VIOLATION=protect python3 hits.py                                  # Llama-8B's shape, on a GPU
    CANARY_ON_VIOLATION=protect python3 hits.py --device cpu                    # a tiny model, vLLM's V1 runner
    CANARY_ON_VIOLATION=protect python3 hits.py --device cpu --v2 --asynchronous # V2, by Triton's interpreter

Run it with ``report`` and with ``protect``, and in another tree for what is to be compared, in one sitting; on a CPU
with other work side by side. One engine serves one request at a time, of two new tokens, in its scheduler's process.
Counted is the time between a call from vLLM into Canary and its return, without what Canary calls of vLLM there. The
clock is the thread's CPU time, so that other work on the machine counts less. On a CPU Canary's ops, kernels on a GPU,
do nothing here: nothing is found (and a ``silence`` event says so), and all else is as beside a GPU, but for launches
and copies. Medians of all hits; results go to ``--out``, too.
"""

import argparse
import functools
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from overhead import Served, parser, prepare

PARTS = {
    "scheduler: blocks recorded": ("canary_vllm.allocator.recorder", "BlockRecorder", "_touched _cached _evicted _put"),
    "scheduler: output": ("canary_vllm.allocator.recorder", "BlockRecorder", "scheduled"),
    "scheduler: recompute": ("canary_adapters.recompute_scheduler", "SchedulerRequests", "note hear _ended"),
    "scheduler: hash chain": ("canary_adapters.hash_chain", "HashChain", "note"),
    "scheduler: verdicts": ("canary_vllm.actions.protection", "Protection", "act ended"),
    "worker: request begins": ("canary_vllm.batches.requests", "Requests", "notice"),
    "worker: prompt": ("canary_vllm.batches.contents", "", "prompt"),
    "worker: slot events": ("canary_adapters.block_events", "BlockEvents", "tell handed_out"),
    "worker: hits": ("canary_adapters.block_replay", "BlockReplay", "_check_hits"),
    "worker: table of tokens": ("canary_adapters.token_table", "Prompts", "table"),
    "worker: tables compared": ("canary_adapters.block_lists", "BlockLists", "compare"),
    "worker: view": ("canary_vllm.session", "Session", "_view"),
    "worker: sampled": ("canary_vllm.session", "Session", "sampled"),
    "worker: answers": ("canary_adapters.answers", "AnswerCheck", "take"),
    "worker: recompute": ("canary_adapters.recompute_pairs", "RecomputePairs", "compare read wanted"),
    "step: check": ("canary_core.guard.forward", "Forward", "issues_first check"),
    "step: record": ("canary_core.guard.forward", "Forward", "record"),
    "step: end": ("canary_core.guard.step", "Step", "end"),
    "step: join": ("canary_core.guard.step", "Step", "join"),
}
"""Whose time is told apart: module, class, functions. The rest is ``other``."""
WARM = 3
"""Turns at first that do not count."""
LAUNCHES, ENGINE, OTHER = "launches", "engine", "other"


class Account:
    """The time of each part, without that of other parts called by it."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._stack = [ENGINE]
        reads = [time.thread_time_ns() for _ in range(1001)]
        self._cost = (reads[-1] - reads[0]) // 1000
        self._last = time.thread_time_ns()

    def _switch(self) -> None:
        now = time.thread_time_ns()
        # To read this clock takes longer than many a function.
        self.spent[self._stack[-1]] += now - self._last - self._cost
        self._last = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, counted as ``part``."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._stack.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._stack.pop()

        return timed

    def follow(self, cpu: bool) -> None:
        """Counts all that Canary does from calls of engines; on a ``cpu`` without its ops. Before Canary starts."""
        from canary_core import Patches
        from canary_core.ops import backends

        wrap, ops = Patches.wrap, backends._ops

        def wrapped(patches: Any, owner: Any, name: str, make: Callable[..., Any]) -> None:
            wrap(patches, owner, name, lambda original: self.timed(OTHER, make(self.timed(ENGINE, original))))

        Patches.wrap = wrapped  # type: ignore[method-assign]
        backends._ops = lambda room: {
            op: (lambda *_: True) if cpu else self.timed(LAUNCHES, run) for op, run in ops(room).items()
        }
        for part, (module, owner, names) in PARTS.items():
            place = __import__(module, fromlist=["_"])
            place = getattr(place, owner) if owner else place
            for name in names.split():
                setattr(place, name, self.timed(part, getattr(place, name)))

    def take(self) -> Counter[str]:
        """The time since the last call."""
        self._switch()
        spent, self.spent = self.spent, Counter()
        return spent


def serve(served: Served, account: Account, prompt: list[int], name: str) -> tuple[Counter[str], Counter[str]]:
    """One request: nanoseconds of each part until its first token, and after it."""
    from vllm import SamplingParams

    engine, first = served.llm.llm_engine, Counter[str]()
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, detokenize=False)
    account.take()
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if not first and outputs:
            first = account.take()
    return first, account.take()


def scheduling(args: argparse.Namespace) -> AbstractContextManager[None]:
    """On a CPU vLLM schedules nothing ahead by itself."""
    if args.device == "cuda" or not args.asynchronous:
        return nullcontext()
    from vllm_on_cpu.engine import as_asked_for

    return as_asked_for()


def main() -> None:
    """Serves, counts, tells."""
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=21, help="hits of each prompt")
    options.add_argument("--v2", action="store_true", help="on a CPU: vLLM's V2 runner, by Triton's interpreter")
    options.set_defaults(hits="1024,8192,65536", out=Path(os.environ.get("OUT", ".")) / "hits.json")
    args = options.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    prepare(args)
    if args.device == "cpu":
        sys.path += [str(Path(__file__).parents[3] / "tests"), str(Path(__file__).parents[1] / "tests")]
        if args.v2:
            __import__("vllm_on_cpu.v2_script")
    account = Account()
    account.follow(args.device == "cpu")
    with scheduling(args):
        served = Served(args)
    lengths, told = [int(length) for length in args.hits.split(",")], {}
    served.turn("on")
    draw = random.Random(1)
    prompts = {length: [draw.randrange(10, served.vocabulary) for _ in range(length)] for length in lengths}
    spans: dict[int, list[tuple[Counter[str], Counter[str]]]] = {length: [] for length in lengths}
    # In turns, so that whatever else the machine does falls on all alike.
    for turn in range(args.repeat + WARM):
        for length in lengths:
            span = serve(served, account, prompts[length], f"{length}-{turn}")
            if turn >= WARM:
                spans[length].append(span)
    for length in lengths:
        for when, each in zip(("first", "after"), zip(*spans[length], strict=True), strict=True):
            parts = {
                part: statistics.median(one[part] / 1e3 for one in each) for part in (*PARTS, OTHER, LAUNCHES, ENGINE)
            }
            parts["Canary"] = statistics.median((one.total() - one[ENGINE]) / 1e3 for one in each)
            told[f"{when} {length}"] = parts
    args.out.write_text(json.dumps(told))
    columns = [f"{when} {length}" for when in ("first", "after") for length in lengths]
    print(f"{'microseconds':32}", *(f"{column:>14}" for column in columns))
    for part in ("Canary", *PARTS, OTHER, LAUNCHES, ENGINE):
        print(f"{part:32}", *(f"{told[column][part]:14.0f}" for column in columns))
    stats = served.session.canary.stats()
    print({name: stats[name] for name in ("checked_forwards", "violations", "hit_blocks") if name in stats})
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
