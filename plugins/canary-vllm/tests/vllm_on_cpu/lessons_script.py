"""Internal requests from which noise is learnt, in an engine that drafts, with the V2 runner, or over two ranks: a
program of its own. KV is equal bit for bit there, so workers never lack lessons: they are told to. Prints one line of
JSON: whether answers are those without Canary, trouble, and the stats of each worker.

    python -m vllm_on_cpu.lessons_script v1|v2|eagle|ranks
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

HOW = sys.argv[1]
if HOW == "v2":
    # Its environment.
    import vllm_on_cpu.v2_script  # noqa: F401

NEW = 60


def prompts() -> list[list[int]]:
    """All but the first one have a hit."""
    from vllm_on_cpu.verified import prompt

    return [prompt("head", 100), *(prompt("head", 100) + prompt(n, 10 + 5 * (n % 3)) for n in range(12))]


def lack(worker: Any = None) -> None:
    """In a worker: it lacks lessons."""
    from canary_vllm.hooks import HOOKS

    from canary_adapters.lessons import LESSON

    for session in HOOKS.sessions:
        session.recomputed._unsent.append(LESSON)


def told(worker: Any) -> dict[str, Any]:
    """In a worker: stats."""
    from canary_vllm.hooks import HOOKS

    for session in HOOKS.sessions:
        session.canary.drain()
        return dict(session.canary.stats())
    return {}


def one_process() -> dict[str, Any]:
    """The same engine without and with Canary."""
    from vllm_on_cpu import guarded, models
    from vllm_on_cpu.engine import SmallEngine

    options: dict[str, Any] = {}
    if HOW == "eagle":
        draft = models.folder("llama_1", Path(mkdtemp()))
        options["speculative_config"] = dict(
            method="eagle", model=draft, num_speculative_tokens=2, draft_tensor_parallel_size=1
        )
    engine = SmallEngine("llama", num_gpu_blocks_override=48, **options)

    def serve(begin: Callable[[], None] = lambda: None) -> list[list[int]]:
        answers = engine.serve(prompts()[:1], 1, "first")
        begin()
        for number, prompt in enumerate(prompts()[1:]):
            engine.submit(str(number), prompt, NEW)
            while number >= 2 and len(engine.ends) <= number - 1 and engine.step():
                pass
        while engine.step():
            pass
        return [*answers, *engine.answers.values()]

    engine.renew()
    plain = serve()
    with guarded.guard(engine, recompute="100%", bytes="all") as guard:
        same = serve(lack) == plain
        return {"same": same, "trouble": guard.trouble(), "stats": [guard.canary.stats()]}


def two_ranks() -> dict[str, Any]:
    """An engine of processes, guarded or not; the answers are compared by whoever runs it twice."""
    from vllm_on_cpu import models
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS

    cores = sorted(os.sched_getaffinity(0))
    own = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ.update({**ENVIRONMENT, **own})
    from vllm import LLM, SamplingParams

    options = {**OPTIONS, "tensor_parallel_size": 2, "num_gpu_blocks_override": 48}
    llm = LLM(model=models.folder("llama", Path(mkdtemp())), **options)

    def serve(some: Sequence[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        done = llm.generate([{"prompt_token_ids": one} for one in some], params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in done]

    answers = serve(prompts()[:1], 1)
    llm.collective_rpc(lack)
    for first in range(1, 13, 3):
        answers += serve(prompts()[first : first + 3], NEW)
    return {"answers": answers, "stats": llm.collective_rpc(told)}


def main() -> None:
    """One line."""
    sys.stdout.write(json.dumps(two_ranks() if HOW == "ranks" else one_process(), default=str) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
