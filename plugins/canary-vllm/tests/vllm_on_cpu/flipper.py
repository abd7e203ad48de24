"""A plugin of vLLM's, for `client_script`: flips bits in a worker's own KV cache when a file asks for it. Nothing of
Canary is used."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

EXPONENT = 1 << 29
"""Of a float32: a number becomes another by orders of magnitude."""


def start() -> None:
    """vLLM calls it in each of its processes."""
    folder = os.environ.get("FLIPS")
    if not folder:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    right = GPUModelRunner.initialize_kv_cache

    def initialize(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = right(self, *args, **kwargs)
        parallel = self.vllm_config.parallel_config
        replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        worker = parallel.rank + replica * parallel.world_size
        threading.Thread(target=_watch, args=(self, worker, Path(folder)), daemon=True).start()
        return made

    GPUModelRunner.initialize_kv_cache = initialize


def _watch(runner: Any, worker: int, folder: Path) -> None:
    """A file names the worker whose bits flip: no other can see them."""
    draw, number = random.Random(f"flipper {worker}"), 1
    while True:
        time.sleep(0.05)
        asked = folder / f"flip-{number}"
        if asked.exists():
            if int(asked.read_text()) == worker:
                partial = folder / f"part-{number}"
                partial.write_text(str(_flip(runner, draw)))
                partial.rename(folder / f"done-{number}")
            number += 1


def _flip(runner: Any, draw: random.Random) -> int:
    """A bit in each block that was written, in a layer by chance. All bytes of a block lie under one index of the first
    dimension."""
    import torch

    layers = [layer.kv_cache for layer in runner.compilation_config.static_forward_context.values()]
    caches = [cache[0] if isinstance(cache, (list, tuple)) else cache for cache in layers]
    with torch.inference_mode():
        written = [block for block in range(1, len(caches[0])) if bool(caches[0][block].any())]
        for block in written:
            bits = draw.choice(caches)[block].view(torch.int32)
            bits[tuple(draw.randrange(size) for size in bits.shape)] ^= EXPONENT
    return len(written)
