"""Two tensor-parallel ranks in processes of their own whose requests are computed again, first as they are, then with
attention of rank 1 scaled wrongly in one layer. Prints one line of JSON: of each phase the answers, and what each rank
found.

    python -m vllm_on_cpu.attention_ranks_script TYPE [KEY=NUMBER of the configuration]
"""

import json
import os
import sys
from typing import Any

from vllm_on_cpu.agree_script import BROKEN, follow

LAYER = 1


def scales(worker: Any) -> None:
    """In a worker: rank 1 scales by 2 % too much."""
    if worker.rank == BROKEN:
        layers = worker.model_runner.compilation_config.static_forward_context
        names = sorted(name for name, layer in layers.items() if hasattr(layer, "impl"))
        layers[names[LAYER]].impl.scale *= 1.02


def told(worker: Any) -> dict[str, Any]:
    """In a worker: what was found since this was asked last."""
    from canary_vllm.hooks import HOOKS

    if not HOOKS.sessions:
        return {}
    canary = HOOKS.sessions[0].canary
    canary.drain()
    found = [violation.fields() for violation in worker.findings.violations]
    worker.findings.violations.clear()
    reasons = [event.fields["reason"] for event in worker.findings.events if event.name == "unjudged"]
    return {"found": found, "reasons": reasons, "stats": canary.stats()}


def main() -> None:
    """Each phase serves prompts of its own."""
    from vllm_on_cpu.attention_types import checkpoint
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS
    from vllm_on_cpu.verified import prompt

    kind, *more = sys.argv[1:]
    cores = sorted(os.sched_getaffinity(0))
    own = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ.update({**ENVIRONMENT, **own})
    from vllm import LLM, SamplingParams

    config = {key: int(number) for key, _, number in (one.partition("=") for one in more)}
    options = {**OPTIONS, "load_format": "auto", "tensor_parallel_size": 2, "num_gpu_blocks_override": 48}
    llm = LLM(model=checkpoint(kind, layers=3, **config), **options)
    guarded = bool(os.environ.get("CANARY_PLUGINS"))
    phases = []
    if guarded:
        llm.collective_rpc(follow)
    for phase in ("clean", "scaled"):
        if phase == "scaled":
            llm.collective_rpc(scales)
        params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, detokenize=False)
        tokens = []
        for wave in range(4):
            # Few at a time: nothing is computed again while requests wait.
            prompts = [{"prompt_token_ids": prompt(f"{phase} {wave} {number}", 50 + number)} for number in range(3)]
            served = llm.generate(prompts, params, use_tqdm=False)
            tokens += [list(answer.outputs[0].token_ids) for answer in served]
        phases.append({"tokens": tokens, "ranks": llm.collective_rpc(told)})
    sys.stdout.write(json.dumps({"phases": phases}, default=str) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
