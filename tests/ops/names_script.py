"""Has Triton name every kernel in its cache: ``python tests/ops/names_script.py 1``, or ``-1`` for the other order.

Prints the names by kernel, as JSON. In a process of its own, since each is named once.
"""

import json
import sys

from compile_script import ROOMS, AbsentGPU
from triton import runtime

from canary_core.ops.kernels import compile_jobs


def main() -> None:
    """Prints the names."""
    runtime.driver.set_active(AbsentGPU())
    kernels = {k.__name__: k for room in ROOMS for k in vars(room).values() if isinstance(k, runtime.jit.JITFunction)}
    for kernel in list(kernels.values())[:: int(sys.argv[1])]:
        compile_jobs.settle_name(kernel)
    sys.stdout.write(json.dumps({name: kernel.cache_key for name, kernel in kernels.items()}) + "\n")


if __name__ == "__main__":
    main()
