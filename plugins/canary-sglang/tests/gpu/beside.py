"""SGLang's own ``--kv-canary`` and canary-sglang in one engine on a GPU, several small engines at a time.

    python3 beside.py [--at-once 5] [--patience 230] [--total 285] [JOB ...]

What only runs there: CUDA graphs of decodes and prefills, EAGLE, MLA's and DeepSeek-V4's kernels, HiCache, PD. Prints
JSON lines of `beside_builtin`, and for HiCache and PD a line for each case: what both sides of us found, and how many
findings the built-in has logged by then. An engine that does not start says why. Jobs are those of `JOBS`; ``dsv4``
takes minutes to compile and is only run by name.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import beside_builtin  # noqa: E402  (the folder above is not on the path before)

JOBS = {
    "llama_breakable": ["--cell", "flips:llama_breakable"],
    "eagle": ["--cell", "flips:eagle"],
    "hicache": ["--transfer", "hicache"],
    "pd": ["--transfer", "pd"],
    "llama_piecewise": ["--cell", "flips:llama_piecewise"],
    "mla": ["--cell", "flips:mla"],
    "llama_pages_fp8": ["--cell", "flips:llama_pages_fp8"],
    "hicache_no_sweep": ["--transfer", "hicache", "--sweep", "0"],
    "llama_graphs": ["--cell", "flips:llama_graphs"],
    "window": ["--cell", "flips:window"],
    "pd_swa": ["--transfer", "pd", "--model", "swa"],
    "oracle": ["--cell", "oracle:llama_graphs"],
    "faults": ["--cell", "faults:llama_graphs"],
    "raises": ["--cell", "raises:llama_graphs"],
    "dsv4": ["--cell", "flips:dsv4"],
}
"""What is least known comes first."""

ALONE = frozenset({"dsv4"})


def run_cell(cell: str) -> None:
    """Prints the rows of a cell of `beside_builtin`, with the engines of `test_engine`."""
    from engines.setups import Setup
    from test_engine import GUARD, SETUPS

    setups = {name: Setup(**fields) for name, (fields, _) in SETUPS.items()}
    for row in beside_builtin.run(cell, setups, GUARD):
        say({"cell": cell, **row})


def run_transfer(what: str, given: argparse.Namespace) -> None:
    """The cases of `pd.py` or `hicache.py`, with the built-in beside."""
    import hicache
    import pd

    module = {"pd": pd, "hicache": hicache}[what]
    for engines in (pd.ENGINES, hicache.ENGINES):
        for options in engines.values():
            options |= {**beside_builtin.BUILT_IN, "kv_canary_sweep_interval": given.sweep}
    # Also where the built-in looks: the first layer of a pool.
    pd.CASES = {"llama": ("clean", "corrupt full k.0", *pd.CASES["llama"]),
                "swa": ("clean", "corrupt swa k.0", *pd.CASES["swa"])}  # fmt: skip
    hicache.CASES = ("clean", "clean", "flip_host k.0", *hicache.CASES[2:])
    if given.side:
        module.side_main(given)
        return
    os.environ.update(beside_builtin.BEST)
    # What each side is started with is the module's own script; here it is this one.
    sys.argv[0] = str(write_starter(["--transfer", what, "--sweep", str(given.sweep)]))
    sides: list[Any] = []
    make, judge = pd.Side.__init__, module.judge

    def made(side: Any, *args: Any, **kwargs: Any) -> None:
        make(side, *args, **kwargs)
        sides.append(side)

    def judged(*args: Any, **kwargs: Any) -> bool:
        good = bool(judge(*args, **kwargs))
        say({"job": what, "built_in_so_far": {side.name: logged(side._log) for side in sides}})
        return good

    pd.Side.__init__, module.judge = made, judged
    module.run(given)
    say({"job": what, "built_in_in_the_end": {side.name: logged(side._log) for side in sides}})


def write_starter(arguments: list[str]) -> Path:
    """A script that is this one with ``arguments`` given."""
    starter = Path(tempfile.mkdtemp()) / "starter.py"
    starter.write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport beside\n"
        f"if __name__ == '__main__':\n    sys.argv[1:1] = {arguments!r}\n    beside.main()\n"
    )
    return starter


def logged(log: Path) -> dict[str, int]:
    """Findings of the built-in in a log, by what it calls them."""
    counts: dict[str, int] = {}
    for line in log.read_text(errors="replace").splitlines():
        _, found, rest = line.partition("kv_canary violation: ")
        if found:
            words = dict(word.split("=", 1) for word in rest.split() if "=" in word)
            name = f"{words.get('launch_tag')} {words.get('fail_reason')}"
            counts[name] = counts.get(name, 0) + 1
    return counts


def run_job(name: str, patience_s: float) -> None:
    """One job in a process group of its own, to its end or that of our patience; prints what it said."""
    if patience_s < 20:
        say({"job": name, "ended": "not begun, for want of time"})
        return
    folder = Path(tempfile.mkdtemp(prefix=f"beside-{name}-"))
    began = time.monotonic()
    with folder.joinpath("out").open("w") as out, folder.joinpath("err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "beside.py"), *JOBS[name]], stdout=out, stderr=err, start_new_session=True
        )
        try:
            ended: int | None = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            # Engines that it started are in groups of their own, and end as their stdin does.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for line in folder.joinpath("out").read_text().splitlines():
        say({"job": name, **json.loads(line)})
    about: dict[str, Any] = {"job": name, "seconds": round(time.monotonic() - began), "ended": ended}
    if ended != 0:
        about["said"] = folder.joinpath("err").read_text(errors="replace")[-1500:]
    say(about)


def say(row: dict[str, Any]) -> None:
    """One line."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--total", type=float, default=285, help="seconds after which everything ends")
    parser.add_argument("--patience", type=float, default=230, help="seconds for one job")
    parser.add_argument("--cell")
    parser.add_argument("--transfer", choices=["pd", "hicache"])
    parser.set_defaults(stress=False)
    parser.add_argument("--sweep", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", default="llama")
    parser.add_argument("--guard", default="both")
    parser.add_argument("--side")
    parser.add_argument("--ports")
    given = parser.parse_args()
    if given.cell:
        run_cell(given.cell)
    elif given.transfer:
        run_transfer(given.transfer, given)
    else:
        names = given.jobs or [name for name in JOBS if name not in ALONE]
        unknown = [name for name in names if name not in JOBS]
        if unknown:
            parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(JOBS)}")
        with ThreadPoolExecutor(given.at_once) as pool:
            end = time.monotonic() + given.total
            list(pool.map(lambda name: run_job(name, min(given.patience, end - time.monotonic())), names))


if __name__ == "__main__":
    main()
