"""Two workers and the scheduler in processes of their own; bits flip in the KV of one rank. Prints one line of JSON:
``asked`` requests that hit flipped blocks, how many answers were ``right`` and ``wrong``, and how many ended with an
``error``.

    python -m vllm_on_cpu.protect_script RANK COUNT [late] [ahead] [stages] [ray]

The workers are tensor-parallel, or the ``stages`` of a pipeline, which are given three requests at a time. With
``late`` each rank knows what it has found when it knows its tokens, or has waited for its forward, as on a GPU. With
``ahead``, asynchronous scheduling. With ``ray``, the workers are Ray's.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

STAGES = dict(
    # vLLM 0.32 on a CPU makes a stage's buffers while it compiles the model.
    pipeline_parallel_size=2, enforce_eager=False, compilation_config={"mode": 2, "backend": "eager"},
)  # fmt: skip
PROMPTS = [[5 + 7 * i + j % (11 + i) for j in range(70 + i)] for i in range(3)]


def flip(worker: Any, rank: int, turn: int, tokens: bool = False) -> None:
    """In a worker: flips a bit of the exponent at one place of each block of one layer, or there of each of the block's
    ``tokens``, on one rank only."""
    import torch

    if worker.rank != rank:
        return
    layers = worker.model_runner.compilation_config.static_forward_context
    bits = [layer.kv_cache for layer in layers.values()][turn % len(layers)].view(torch.int32)
    head, token, number = (turn * 5 % size for size in bits.shape[1:])
    bits[1:, head, slice(None) if tokens else token, number] ^= 1 << 29


def begin_ray() -> None:
    """A cluster of this machine, which is said to have two GPUs, and a platform of vLLM's that takes it."""
    folder = Path(tempfile.mkdtemp(prefix="canary-ray-"))
    info = folder / "ray_on_cpu-0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: ray-on-cpu\nVersion: 0\n")
    info.joinpath("entry_points.txt").write_text(
        "[vllm.platform_plugins]\nray_on_cpu = vllm_on_cpu.ray_platform:name\n"
    )
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    import ray

    cluster = ray.init(num_cpus=4, num_gpus=2, include_dashboard=False)
    os.environ["RAY_ADDRESS"] = cluster.address_info["address"]


def main() -> None:
    """Each prompt once, then again and again with flips between."""
    # Ray's workers have a `__main__` of their own.
    from vllm_on_cpu import late_verdicts, models
    from vllm_on_cpu import protect_script as named
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS, as_asked_for
    from vllm_on_cpu.gate_ranks_script import attend

    rank, count = map(int, sys.argv[1:3])
    late, ahead, stages = (word in sys.argv for word in ("late", "ahead", "stages"))
    cores = sorted(os.sched_getaffinity(0))
    own = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ.update({**ENVIRONMENT, **own, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    if "ray" in sys.argv:
        begin_ray()
    from vllm import LLM, SamplingParams

    options = {**OPTIONS, "async_scheduling": ahead, **(STAGES if stages else {"tensor_parallel_size": 2})}
    if "ray" in sys.argv:
        options["distributed_executor_backend"] = "ray"
    with as_asked_for():
        llm = LLM(model=models.folder("llama", Path(tempfile.mkdtemp())), **options)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)

    def serve(numbers: list[int]) -> list[tuple[list[int], str]]:
        answers = llm.generate([{"prompt_token_ids": PROMPTS[one]} for one in numbers], params, use_tqdm=False)
        return [(list(answer.outputs[0].token_ids), str(answer.outputs[0].finish_reason)) for answer in answers]

    llm.collective_rpc(attend)
    every = list(range(len(PROMPTS)))
    right = [answer for answer, _ in serve(every)]
    if late:
        llm.collective_rpc(late_verdicts.begin)
    told = dict.fromkeys(("asked", "right", "wrong", "error"), 0)
    for turn in range(count):
        numbers = every if stages else [turn % len(PROMPTS)]
        llm.collective_rpc(partial(named.flip, rank=rank, turn=turn, tokens=stages))
        for number, (answer, ended) in zip(numbers, serve(numbers), strict=True):
            told["asked"] += 1
            told["error" if ended == "error" else "right" if answer == right[number] else "wrong"] += 1
    llm.llm_engine.engine_core.shutdown()
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
