"""Two data-parallel replicas of one engine, as ``vllm serve -dp 2`` makes them. Prints one line of JSON.

python -m vllm_on_cpu.replicas_script
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Serves a little and ends both. What Canary tells is on stderr, also by the engines' processes."""
    from vllm_on_cpu import models
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS

    # The engine cores are processes of their own.
    os.environ.update({**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {**OPTIONS, "data_parallel_size": 2, "served_model_name": ["tiny"]}
    arguments = AsyncEngineArgs(model=models.folder("llama", Path(tempfile.mkdtemp())), **options)
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)

    async def ask(llm: AsyncLLM, number: int) -> int:
        prompt = {"prompt_token_ids": list(range(5 + number, 60 + number))}
        answers = [out async for out in llm.generate(prompt, params, f"r{number}", data_parallel_rank=number % 2)]
        return len(answers[-1].outputs[0].token_ids)

    async def run() -> int:
        llm = AsyncLLM.from_engine_args(arguments)
        answered = sum(await asyncio.gather(*[ask(llm, number) for number in range(8)]))
        llm.shutdown()
        return answered

    sys.stdout.write(json.dumps({"answers": asyncio.run(run())}) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
