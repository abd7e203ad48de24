"""Two tensor-parallel workers and the scheduler in processes of their own, and a connector that brings wrong KV to one
rank. Prints one line of JSON: ``asked`` requests, how many answers were ``right`` and ``wrong``, how many ended with an
``error``, and the number of blocks that each of the ``ranks`` gated.

    python -m vllm_on_cpu.gate_ranks_script RANK STEPS POLICY COUNT [late]

With ``late``, asynchronous scheduling, and what is copied from the device in a step is there when the tokens of the
step are, as on a GPU; the next step takes longer than the scheduler needs to give them out.
"""

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from vllm_on_cpu.protect_script import PROMPTS

NEXT_S = 0.3


def attend(worker: Any) -> None:
    """In a worker: answers depend on all of the prompt."""
    # A pipeline's stage has some of the layers.
    for layer in (one for one in worker.model_runner.get_model().model.layers if hasattr(one, "input_layernorm")):
        layer.input_layernorm.weight.data.fill_(1000)


def spoil(worker: Any, rank: int, length: int) -> None:
    """In a worker: from now on each value of blocks that end after ``length`` tokens comes with another sign and size,
    so that the first token is wrong."""
    from vllm_on_cpu.host_store import STORE

    if worker.rank == rank:
        STORE.fault = lambda prefix, name, data: data * -1e4 if len(prefix) == length else data


def know_copies_with_tokens(worker: Any) -> None:
    """In a worker: from now on."""
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput as Output

    from canary_core import Patches
    from canary_core.runtime.host_copy import HostCopy

    patches, steps, known = Patches(), 0, 0

    def issues(original: Any) -> Any:
        def execute(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            time.sleep(NEXT_S)
            return original(*args, **kwargs)

        return execute

    def waits(original: Any) -> Any:
        def get_output(self: Any) -> Any:
            nonlocal known
            made = original(self)
            known = max(known, self.canary_step)
            return made

        return get_output

    def begun(_: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        self.canary_step = steps

    patches.wrap(worker, "execute_model", issues)
    patches.follow(Output, "__init__", begun)
    patches.wrap(Output, "get_output", waits)
    patches.follow(HostCopy, "start", begun)
    patches.wrap(HostCopy, "arrived", lambda _: lambda self: self.canary_step <= known)


def gated(worker: Any) -> int:
    """In a worker: how many blocks it found."""
    from canary_vllm.hooks import HOOKS

    return sum(session.canary.stats().get("gated_blocks", 0) for session in HOOKS.sessions)


def main() -> None:
    """Each prompt once, then again and again from the connector."""
    from vllm_on_cpu import models
    from vllm_on_cpu.engine import BLOCK, ENVIRONMENT, OPTIONS, as_asked_for

    rank, steps, policy, count = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    late = "late" in sys.argv
    cores = sorted(os.sched_getaffinity(0))
    own = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ.update({**ENVIRONMENT, **own, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    from vllm import LLM, SamplingParams

    connector = dict(
        kv_connector="RankedStore", kv_connector_module_path="vllm_on_cpu.ranked_store", kv_role="kv_both",
        kv_load_failure_policy=policy, kv_connector_extra_config={"steps": steps},
    )  # fmt: skip
    options = {**OPTIONS, "tensor_parallel_size": 2, "kv_transfer_config": connector, "async_scheduling": late}
    with as_asked_for():
        llm = LLM(model=models.folder("llama", Path(tempfile.mkdtemp())), **options)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)

    def serve(prompt: list[int]) -> tuple[list[int], str]:
        llm.reset_prefix_cache()
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return list(answer.outputs[0].token_ids), str(answer.outputs[0].finish_reason)

    llm.collective_rpc(attend)
    right = [serve(prompt)[0] for prompt in PROMPTS]
    if late:
        llm.collective_rpc(know_copies_with_tokens)
    told: dict[str, Any] = dict.fromkeys(("asked", "right", "wrong", "error"), 0)
    for turn in range(count):
        number = turn % len(PROMPTS)
        # Of every other turn each block is right.
        llm.collective_rpc(partial(spoil, rank=rank, length=turn % 2 * 2 * BLOCK))
        answer, ended = serve(PROMPTS[number])
        told["asked"] += 1
        told["error" if ended == "error" else "right" if answer == right[number] else "wrong"] += 1
    told["ranks"] = llm.collective_rpc(gated)
    llm.llm_engine.engine_core.shutdown()
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
