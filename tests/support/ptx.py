"""Compiles every kernel to PTX for a GPU that need not be there, and says what came of it, for a comparison of two
trees: a change of names alone leaves every line the same.

PYTHONPATH=src:tests:. python -m support.ptx            a line for each variant: place, kernel, hash of its PTX
PYTHONPATH=src:tests:. python -m support.ptx FOLDER     also writes each PTX there
"""

import hashlib
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
# Nothing made here is ever launched, so it must not be found by who launches.
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="canary-ptx-")
sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

import torch
import triton
from compile_script import AbsentGPU, compile_all
from ops.scenario import Scenario, scenario
from triton.backends.nvidia.compiler import CUDABackend

from benchmarks.layouts import LAYOUTS
from canary_core import KVSource, Region, RegionKind
from canary_core.ops.kernels import launch

SEEDS = (0, 1, 2, 4, 6, 7, 11, 13)
"""Scenarios that together have every kind of region, with a slot map, rings, pages and several shapes of sources."""
SLOTS = 128
LONG_WORDS = (3000, 16384)


def regions() -> Iterator[tuple[str, Scenario]]:
    """Regions by name: of random layouts, of real engines' layouts, and of long slots."""
    for seed in SEEDS:
        yield f"scenario-{seed}", scenario(seed)
    for name, layout in LAYOUTS.items():
        sources = layout.sources(SLOTS, 2, torch.device("cpu"))
        yield name, _scenario(Region("r", SLOTS, sources, null_slot=0), layout.page_size, 0)
    for words in LONG_WORDS:
        region = Region("r", 16, tuple(_states(words, layer) for layer in range(3)), RegionKind.STATE, null_slot=0)
        yield f"states-{words}", _scenario(region, 1, 1)


def _states(words: int, layer: int) -> KVSource:
    tensor = torch.zeros(16, words, dtype=torch.float32)
    return KVSource(tensor, "ssm", layer, 4 * words, slot_stride_bytes=4 * words, dtype=tensor.dtype)


def _scenario(region: Region, page_size: int, ring_slots: int) -> Scenario:
    choices = [random.Random(number) for number in range(5)]
    return Scenario(region, choices[0], page_size, ring_slots, None, torch.device("cpu"), *choices[1:])


def bare(ptx: str) -> str:
    """The instructions: without comments, lines of the source, and sections for a debugger."""
    code = ptx.split("\t.section")[0]
    lines = (re.sub(r"\s*//.*", "", line).rstrip() for line in code.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"\s*\.(loc|file)\b|\$L__tmp\d+:", line))


@contextmanager
def telling(tell: Callable[[str, str], None]) -> Iterator[None]:
    """Context: each launch compiles its kernel to PTX and no further, and is told by the kernel's name; each variant
    once."""
    told: set[int] = set()

    def note(launcher: launch.Launcher, grid: tuple[int, int], given: Any) -> None:
        made = launcher.warm_up(grid, given)
        if id(made) not in told:
            told.add(id(made))
            tell(launcher.kernel.__name__, made.asm["ptx"])

    triton.runtime.driver.set_active(AbsentGPU())
    CUDABackend.make_cubin = lambda *rest: b""
    launch._instead.set(note)
    yield


def main() -> None:
    """Prints the lines."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    for name, region in regions():
        number = 0

        def tell(kernel: str, ptx: str, name: str = name) -> None:
            nonlocal number
            number += 1
            code = bare(ptx).replace(kernel, "kernel")
            place = f"{name}/{number:02} {kernel}"
            if folder:
                (folder / place.replace("/", "-").replace(" ", "-")).with_suffix(".ptx").write_text(code)
            sys.stdout.write(f"{place} {hashlib.sha256(code.encode()).hexdigest()[:16]}\n")
            sys.stdout.flush()

        with telling(tell):
            compile_all(region)


if __name__ == "__main__":
    main()
