"""The kernels that `generate()` under guard asks of Triton, for a GPU that need not be there; none is compiled.

python -m tiny.compiled_script

Prints, as JSON, for each way of generating: how many kernels there were after each of some prompts, each longer than
the last; and those that are first launched after the first token and that no process was given to compile. In a
process of its own, since Triton decides once whether it interprets.
"""

import json
import os
import sys
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from ops.compile_script import AbsentGPU

from canary_core.guard import start_up, warm_up
from canary_core.ops import backends
from canary_core.ops.kernels import launch
from canary_core.ops.kernels.compile_jobs import job_of
from tiny.generation import generate, listening, prompts
from tiny.models import generating

LENGTHS = (11, 12, 16, 17, 20, 31, 32, 33, 48, 50)
NEW = 30
"""More than the forwards in which the two ops of a record are launched one after the other in any case."""

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {}),
    "window": ("gemma3", {}),
    "static": ("llama", {"cache_implementation": "static", "disable_compile": True}),
}


class Asked:
    """Kernels by the name of their job: of launches, and given to another process."""

    def __init__(self) -> None:
        self.launched: dict[str, str] = {}
        self.given: set[str] = set()

    def note(self, launcher: Any, grid: tuple[int, int], given: Any) -> None:
        """In the place of a first launch."""
        job = job_of(launcher.kernel, partial(launcher.warm_up, grid, given))
        if job is not None:
            self.launched.setdefault(job.key, launcher.kernel.__name__)

    def beside(self, launches: Callable[[], None], running: object) -> None:
        """In the place of another process."""
        self.given |= copy_context().run(launch._jobs_of, launches).keys()


def main() -> None:
    """Prints the numbers."""
    triton.runtime.driver.set_active(AbsentGPU())
    found: dict[str, object] = {}
    make = backends.triton_backend
    for way, (model, settings) in WAYS.items():
        asked = Asked()
        launch._instead.set(asked.note)
        backends.triton_backend = lambda asked=asked: replace(make(), compile_beside=asked.beside)  # type: ignore[misc]
        warm_up._compiles = lambda states: True
        start_up.ALONE = start_up.Alone()
        first: set[str] = set()
        counts = []
        with listening(generating(model), backend="triton", read_check=0)[0]:
            for length in LENGTHS:
                generate(generating(model), prompts(2, length), max_new_tokens=2, **settings)
                counts.append(len(asked.launched))
                first = first or {*asked.launched}
            generate(generating(model), prompts(2, LENGTHS[0]), max_new_tokens=NEW, **settings)
        late = {key: name for key, name in asked.launched.items() if key not in first}
        found[way] = {
            "counts": counts,
            "late": len(late),
            "left": sorted(late[key] for key in late.keys() - asked.given),
        }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
