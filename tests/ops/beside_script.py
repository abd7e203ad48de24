"""Has another process compile a kernel for a GPU that need not be there: ``python tests/ops/beside_script.py``.

Prints, as JSON, what each of `compile_beside`'s promises came to. In a process of its own, since Triton decides once
whether it interprets.
"""

import json
import os
import sys
from typing import Any

import triton
from compile_script import AbsentGPU
from ops.scenario import ownership, scenario

from canary_core.ops.backends import triton_backend
from canary_core.ops.compile_process import CACHE_VARIABLE
from canary_core.ops.kernels import launch


def launches() -> None:
    """A small one."""
    backend: Any = triton_backend()
    s = scenario(0)
    backend.alloc(s.state(read_check=-1), *ownership(s))


def main() -> None:
    """Prints what came of it."""
    triton.runtime.driver.set_active(AbsentGPU())
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    process = launch.compile_beside(launches, [])
    if process is None:
        raise RuntimeError("no process compiles")
    told: dict[str, object] = {"keys": len(process.keys), "compiled_here": len(hits)}
    told["for_others"] = launch.compile_beside(launches, [process]) is not None
    process.wait()
    told |= {"code": process.code, "took": process.seconds > 0}
    process.remember()
    told["again"] = launch.compile_beside(launches, []) is not None
    # As `torch.compile` does.
    os.environ[CACHE_VARIABLE] += "/another"
    launch._instead.set(launch.Launcher.warm_up)
    with process.same_cache():
        launches()
    told |= {"hits": sum(hits), "misses": len(hits) - sum(hits), "put_back": os.environ[CACHE_VARIABLE][-8:]}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
