"""An engine of which one process is killed with -9 while it serves. Prints one line of JSON.

    python -m vllm_on_cpu.killed_script WHAT

``WHAT``: ``worker``: one of two tensor-parallel workers; ``stage``: the first of two stages of a pipeline;
``scheduler``: the engine core of two tensor-parallel workers, which is stopped first, so that it answers nobody;
``replica``: the engine core of one of two data-parallel replicas. With ``CANARY_ON_VIOLATION=protect`` bits flip
before, in what the requests then hit.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from vllm_on_cpu.protect_script import STAGES

VICTIMS = {"worker": "Worker_TP1", "stage": "Worker_PP0", "scheduler": "EngineCore", "replica": "EngineCore_DP1"}
RANKS = {"tensor_parallel_size": 2}
SIZES: dict[str, dict[str, Any]] = {
    "worker": RANKS, "scheduler": RANKS, "replica": {"data_parallel_size": 2}, "stage": STAGES,
}  # fmt: skip
STOPPED_S = 60.0
"""Requests that have no answer after so long count as waiting for ever, and processes as left."""


def main() -> None:
    """Serves four requests, kills, and sends four more. Tells ``failed``: the exception of each request, and how many
    seconds after the kill; ``answered``: how many of the first and of the later ones were; ``left``: names of processes
    and files of Canary's that are still there."""
    from vllm_on_cpu import models
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS
    from vllm_on_cpu.protect_script import flip

    what = sys.argv[1]
    os.environ.update({**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="killed-")
    import psutil
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {**OPTIONS, **SIZES[what], "served_model_name": ["tiny"]}
    arguments = AsyncEngineArgs(model=models.folder("llama", Path(tempfile.mkdtemp())), **options)
    protects = os.environ.get("CANARY_ON_VIOLATION") == "protect"
    outputs, killed = 0, 0.0
    told: dict[str, Any] = {"failed": [], "answered": [0, 0]}

    async def ask(llm: AsyncLLM, number: int, tokens: int = 180) -> None:
        nonlocal outputs
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": list(range(5 + number, 60 + number))}
        rank = number % 2 if what == "replica" else None
        async for _ in llm.generate(prompt, params, f"r{number}-{tokens}", data_parallel_rank=rank):
            outputs += 1

    def alive(process: psutil.Process) -> bool:
        try:
            # This process's own tracker of what is shared lives as long as it does.
            ours = process.ppid() == os.getpid() and "resource_tracker" in " ".join(process.cmdline())
            return not ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    async def asked(llm: AsyncLLM, number: int) -> None:
        try:
            await asyncio.wait_for(ask(llm, number), STOPPED_S)
            told["answered"][number > 3] += 1
        except Exception as error:
            told["failed"].append([type(error).__name__, round(time.monotonic() - killed, 1)])

    async def run() -> None:
        nonlocal killed, outputs
        llm = AsyncLLM.from_engine_args(arguments)
        if protects:
            await asyncio.gather(*[ask(llm, number, 2) for number in range(4)])
            await llm.collective_rpc(partial(flip, rank=int(what != "replica"), turn=0))
        outputs = 0
        first = [asyncio.create_task(asked(llm, number)) for number in range(4)]
        while outputs < 8:
            await asyncio.sleep(0.01)
        every = psutil.Process().children(recursive=True)
        victim = next(process for process in every if VICTIMS[what] in process.name())
        if what == "scheduler":
            os.kill(victim.pid, signal.SIGSTOP)
            await asyncio.sleep(3)
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        await asyncio.gather(*first)
        await asyncio.gather(*[asked(llm, number) for number in range(4, 8)])
        llm.shutdown()
        end = time.monotonic() + STOPPED_S
        while (left := [one for one in every if alive(one)]) and time.monotonic() < end:
            await asyncio.sleep(0.2)
        told["left"] = [process.name() for process in left]

    asyncio.run(run())
    every = [path for path in Path(tempfile.gettempdir()).rglob("*") if "canary" in str(path) and not path.is_dir()]
    told["left"] += [path.name for path in every]
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
