"""An engine core in a process of its own that has served some requests under guard, and is idle until the input of this
process ends. The line "change" changes a weight under the kept cache, "reset" empties the cache.

    python -m vllm_on_cpu.idle_script
"""

import os
import sys
from typing import Any

from vllm_on_cpu import verified
from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS

REQUESTS = 30
DECODED = 60


def main() -> None:
    """Prints a line once nothing runs, and one for each line of input that was obeyed."""
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ.update(environment)
    from vllm import LLM, SamplingParams

    # By a name that the engine's process finds, too.
    from vllm_on_cpu.idle_script import scale

    llm = LLM(model=verified.weighty(), **{**OPTIONS, "num_gpu_blocks_override": 256, "load_format": "auto"})
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=DECODED, temperature=0, ignore_eos=True, detokenize=False)
    for number in range(0, REQUESTS, 3):
        for one in range(number, number + 3):
            engine.add_request(f"request {one}", {"prompt_token_ids": verified.prompt(one, 30)}, params)
        while engine.has_unfinished_requests():
            engine.step()
    say("idle")
    for line in sys.stdin:
        if line == "change\n":
            llm.apply_model(scale)
        else:
            llm.reset_prefix_cache()
        say("done")
    engine.engine_core.shutdown()
    os._exit(0)


def say(line: str) -> None:
    """To whoever started this process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def scale(model: Any) -> None:
    """In the worker."""
    model.model.layers[0].post_attention_layernorm.weight.data.mul_(1.05)


if __name__ == "__main__":
    main()
