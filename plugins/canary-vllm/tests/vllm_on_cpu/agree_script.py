"""Two tensor-parallel ranks in processes of their own, of which rank 1 is broken from outside, in one way after the
other. Prints one line of JSON: of each phase the answers, and what each rank told.

    python -m vllm_on_cpu.agree_script MODEL DTYPE PHASE...
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

PROMPTS = [[7 + 3 * i for i in range(20)], [11 + 5 * i for i in range(9)]]
TOKENS = 30
BROKEN = 1
"""The rank."""


def follow(worker: Any) -> None:
    """In a worker: keeps what Canary tells from now on."""
    from canary_core import hook_manager
    from canary_core.testing import Findings

    worker.findings = Findings()
    hook_manager().register(worker.findings)


def breaks(worker: Any, what: str, at: int) -> None:
    """In a worker: the forward ``at`` from now on is broken in rank 1, once."""
    if worker.rank != BROKEN:
        return
    import torch

    from canary_core import testing

    runner = worker.model_runner
    left = [at]

    def now() -> bool:
        left[0] -= 1
        return left[0] == 0

    if what == "tokens":
        prepare = runner._prepare_inputs

        def prepared(*args: Any, **kwargs: Any) -> Any:
            made = prepare(*args, **kwargs)
            if now():
                runner.input_ids.gpu[0] += 1
            return made

        runner._prepare_inputs = prepared
    elif what == "sampled":
        sample = runner.sampler.forward

        def sampled(*args: Any, **kwargs: Any) -> Any:
            made = sample(*args, **kwargs)
            if now():
                made.sampled_token_ids[0] += 1
            return made

        runner.sampler.forward = sampled
    elif what == "absent":
        from canary_vllm.hooks import HOOKS

        HOOKS.sessions[0].canary.step.pause()
    elif what == "kv":
        from canary_vllm.hooks import HOOKS

        state = HOOKS.sessions[0].canary.states["full"]
        source = next(s for s in state.sources if s.layer == 1)

        def flip(*_: Any) -> None:
            if now():
                slot = runner.input_batch.block_table[0].slot_mapping.gpu[:1].long().clone()
                content = testing.read_bytes(source, slot)
                content[0, 5] ^= 4
                testing.write_bytes(source, slot, content)

        with torch.inference_mode():
            runner.get_model().model.layers[-1].register_forward_hook(flip)


def told(worker: Any) -> dict[str, Any]:
    """In a worker: what was told since this was asked last."""
    import torch
    from canary_vllm.hooks import HOOKS

    sessions = HOOKS.sessions
    if not sessions:
        return {}
    with torch.inference_mode():
        sessions[0].canary.drain()
    found = [violation.fields() for violation in worker.findings.violations]
    events = [{"event": e.name, **e.fields} for e in worker.findings.events if e.name not in ("stats", "incident")]
    worker.findings.violations.clear()
    worker.findings.events.clear()
    counts = {name: n for name, n in sessions[0].canary.stats().items() if name.startswith("ranks_")}
    return {"found": found, "events": events, "counts": counts, "forwards": sessions[0].canary.forwards}


def main() -> None:
    """Each phase serves the same prompts: ``clean``, with a fault a few tokens before the end, or with rank 1's Canary
    paused from now on (``absent``)."""
    from vllm_on_cpu import models
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS

    model, dtype, *phases = sys.argv[1:]
    cores = sorted(os.sched_getaffinity(0))
    own = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ.update({**ENVIRONMENT, **own})
    from vllm import LLM, SamplingParams

    options = {**OPTIONS, "dtype": dtype, "tensor_parallel_size": 2, "enable_prefix_caching": False}
    llm = LLM(model=models.folder(model, Path(tempfile.mkdtemp())), **options)
    guarded = bool(os.environ.get("CANARY_PLUGINS"))
    if guarded:
        llm.collective_rpc(follow)
    answers: list[dict[str, Any]] = []
    for number, phase in enumerate(phases):
        if guarded and phase != "clean":
            llm.collective_rpc(partial(breaks, what=phase, at=TOKENS - 5))
        params = SamplingParams(max_tokens=TOKENS, temperature=0.7, seed=number, ignore_eos=True, detokenize=False)
        served = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        tokens = [list(answer.outputs[0].token_ids) for answer in served]
        ranks = llm.collective_rpc(told) if guarded else []
        answers.append({"phase": phase, "tokens": tokens, "ranks": ranks})
    sys.stdout.write(json.dumps(answers, default=str).join(('{"phases": ', "}\n")))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
