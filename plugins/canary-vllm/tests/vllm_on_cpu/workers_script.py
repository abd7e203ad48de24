"""Engines of two tensor-parallel workers, of which one is broken from outside of Canary. Prints one line of JSON.

    python -m vllm_on_cpu.workers_script BROKEN

``BROKEN``: ``nothing``; ``plugins``: one worker runs as if ``CANARY_PLUGINS`` were not set on its machine;
``settings``: it has another ``CANARY_READ_CHECK``; ``package``: canary-vllm can't be imported there; ``version``: it is
of another release; ``raise``: as ``plugins``, in raise mode.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS = [list(range(5 + i, 60 + i)) for i in range(4)]


def main() -> None:
    """Serves a little, ends the engine, and tells what was answered. What Canary tells is on stderr."""
    from vllm_on_cpu import models
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS

    broken = sys.argv[1]
    os.environ.update({**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "BROKEN_WORKER": broken})
    from vllm import LLM, SamplingParams

    more: dict[str, Any] = dict(tensor_parallel_size=2, worker_cls="vllm_on_cpu.broken_worker.Worker")
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    told: dict[str, Any] = {"answers": 0}
    try:
        llm = LLM(model=models.folder("llama", Path(tempfile.mkdtemp())), **{**OPTIONS, **more})
        answers = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        told["answers"] = sum(len(a.outputs[0].token_ids) for a in answers)
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:
        told["failed"] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
