"""An engine core in a process of its own, with so many ranks, that serves long requests under guard until the input of
this process ends.

    python -m vllm_on_cpu.served_script RANKS
"""

import os
import sys
import threading


def main() -> None:
    """Prints a line once requests run. Some run at any time."""
    from vllm_on_cpu import verified
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS

    ranks = int(sys.argv[1])
    cores = sorted(os.sched_getaffinity(0))
    own = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"} if ranks > 1 else {}
    os.environ.update({**ENVIRONMENT, **own, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    from vllm import LLM, SamplingParams

    longer = dict(max_model_len=1024, num_gpu_blocks_override=256, load_format="auto", tensor_parallel_size=ranks)
    engine = LLM(model=verified.weighty(), **{**OPTIONS, **longer}).llm_engine
    ends = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
    params = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True, detokenize=False)
    running, number = 0, 0
    while not ends.is_set():
        while running < 3:
            engine.add_request(f"request {number}", {"prompt_token_ids": verified.prompt(number)}, params)
            running, number = running + 1, number + 1
        running -= sum(output.finished for output in engine.step())
        if number == 3:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            number += 1
    engine.engine_core.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
