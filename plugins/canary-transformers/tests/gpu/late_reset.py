"""How often asynchronous batches of Transformers answer wrongly on a busy GPU, without Canary.

    PYTHONPATH=src:plugins/canary-transformers/src python3 plugins/canary-transformers/tests/gpu/late_reset.py

Four processes serve the same requests again and again, and compare each answer with that of batches in step; four
others multiply matrices. See `test_gpu.LateReset`. Prints a line a process; 50 s and some to start.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from tiny.batching import Traffic, serve, served

SERVING, MULTIPLYING = 4, 4


def multiply(seconds: float) -> str:
    """Keeps the GPU busy."""
    matrix, end, rounds = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16), time.time() + seconds, 0
    while time.time() < end:
        for _ in range(50):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        rounds += 1
    return f"{rounds * 50} products"


def serve_again(seconds: float) -> str:
    """Serves the same requests, and counts the runs in which an answer is another one."""
    transformers.logging.set_verbosity_error()
    model = served("llama", "cuda")

    def answers(behind: bool) -> list[list[int]]:
        options = {"use_cuda_graph": behind, "use_async_batching": behind, "allow_block_sharing": False}
        return list(serve(model, Traffic(seed=3, requests=4, new_tokens=14, options=options)).values())

    right, end, runs, wrong = answers(behind=False), time.time() + seconds, 0, 0
    while time.time() < end:
        runs += 1
        wrong += answers(behind=True) != right
    return f"{runs} runs, answers wrong in {wrong}"


def main() -> None:
    """All of them at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=35)
    parser.add_argument("--child", choices=("serve", "multiply"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        sys.stdout.write({"serve": serve_again, "multiply": multiply}[args.child](args.seconds) + "\n")
        return
    command = [sys.executable, __file__, "--seconds", str(args.seconds), "--child"]
    children = [
        subprocess.Popen([*command, "serve" if n < SERVING else "multiply"]) for n in range(SERVING + MULTIPLYING)
    ]
    sys.exit(max(child.wait() for child in children))


if __name__ == "__main__":
    main()
