"""An engine of which one process is killed with -9 while it serves. Prints one line of JSON.

    python -m vllm_on_cpu.killed_script WHAT

``WHAT``: ``worker``: one of two tensor-parallel workers; ``replica``: the engine core of one of two data-parallel
replicas.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VICTIMS = {"worker": "Worker_TP1", "replica": "EngineCore_DP1"}
SIZES = {"worker": "tensor_parallel_size", "replica": "data_parallel_size"}
STOPPED_S = 60.0
"""Requests that have no answer after so long count as waiting for ever."""


def main() -> None:
    """Serves four requests, kills, and sends four more. Tells ``failed``: the exception of each request, and how many
    seconds after the kill; ``answered``: how many of the first and of the later ones were."""
    from vllm_on_cpu import models
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS

    what = sys.argv[1]
    os.environ.update({**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    import psutil
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {**OPTIONS, SIZES[what]: 2, "served_model_name": ["tiny"]}
    arguments = AsyncEngineArgs(model=models.folder("llama", Path(tempfile.mkdtemp())), **options)
    params = SamplingParams(max_tokens=180, temperature=0, ignore_eos=True, detokenize=False)
    outputs, killed = 0, 0.0
    told: dict[str, Any] = {"failed": [], "answered": [0, 0]}

    async def ask(llm: AsyncLLM, number: int) -> None:
        nonlocal outputs
        prompt = {"prompt_token_ids": list(range(5 + number, 60 + number))}
        rank = number % 2 if what == "replica" else None
        async for _ in llm.generate(prompt, params, f"r{number}", data_parallel_rank=rank):
            outputs += 1

    async def asked(llm: AsyncLLM, number: int) -> None:
        try:
            await asyncio.wait_for(ask(llm, number), STOPPED_S)
            told["answered"][number > 3] += 1
        except Exception as error:
            told["failed"].append([type(error).__name__, round(time.monotonic() - killed, 1)])

    async def run() -> None:
        nonlocal killed
        llm = AsyncLLM.from_engine_args(arguments)
        first = [asyncio.create_task(asked(llm, number)) for number in range(4)]
        while outputs < 8:
            await asyncio.sleep(0.01)
        every = psutil.Process().children(recursive=True)
        victim = next(process for process in every if VICTIMS[what] in process.name())
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        await asyncio.gather(*first)
        await asyncio.gather(*[asked(llm, number) for number in range(4, 8)])
        llm.shutdown()

    asyncio.run(run())
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
