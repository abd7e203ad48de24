"""Compiles some kernels together for a GPU that need not be there, by a driver that makes nothing but notes: ``python
tests/ops/ready_script.py``.

Prints, as JSON, how many kernels were compiled, how many of them were loaded and had a launcher made, and how many of
those in this process's first thread. In a process of its own, since Triton decides once whether it interprets.
"""

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import triton
from compile_script import AbsentGPU, compile_all
from ops.scenario import scenario

from canary_core.ops.kernels import launch

THREADS: list[str] = []


class NotingGPU(AbsentGPU):
    """What Triton's compiled kernels ask their driver before the first launch."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10}, load_binary=self.load
        )

    def launcher_cls(self, *parts: Any) -> object:
        """Made for a kernel; for some Tritons by a C compiler."""
        THREADS.append(threading.current_thread().name)
        return object()

    def load(self, *binary: Any) -> tuple[int, ...]:
        """Module, function, registers, spills and most threads."""
        return 1, 1, 32, 0, 1024


def main() -> None:
    """Prints the numbers."""
    triton.runtime.driver.set_active(NotingGPU())
    made: list[Any] = []
    warm_up = triton.runtime.jit.JITFunction.warmup

    def noted(*given: Any, **options: Any) -> Any:
        made.append(warm_up(*given, **options))
        return made[-1]

    triton.runtime.jit.JITFunction.warmup = noted
    launch.compile_together(lambda: compile_all(scenario(0)))
    kernels = {id(kernel): kernel for kernel in (promise.result() for promise in made)}
    loaded = sum(kernel.function is not None for kernel in kernels.values())
    first = THREADS.count(threading.main_thread().name)
    told = {"compiled": len(kernels), "loaded": loaded, "launchers": len(THREADS), "in_first": first}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
