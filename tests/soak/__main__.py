"""Random traffic over real engines under guard, on this machine's CPU or on one GPU.

    python3 tests/soak --seconds 600                                              every engine, one after the other
    python3 tests/soak --setups vllm/ngram sglang/mha --seed 7 --rounds 12        these rounds, again
    python3 tests/soak --device cuda --engines vllm --side-by-side 8 --seconds 330 --until $(($(date +%s)+460))

Each setup is an engine in a process of its own. It serves rounds of random requests: of all lengths, with shared
prefixes, given up in the middle, its cache flushed now and then. The same seed asks the same. Nothing may be found, and
where answers are the same whenever a round is served, some rounds are served once more while Canary is paused, and must
be answered the same. ``--seconds`` is how long traffic lasts, which all setups share; their starts come on top of it.
After ``--until``, in seconds of the epoch, there is no traffic in any case. Settings are Canary's defaults and
CANARY_READ_CHECK=64, so that 64 slots a forward have their bytes compared before it; any CANARY_* variable wins.

Results of all setups go to ``--out``/soak.json every few seconds, so that a killed run leaves its counts; the table,
its totals last, to soak.txt, too. Each setup's own JSON and log go to ``--work``. Exits with 1 if a setup failed; each
failure is printed with its seed and the command that repeats it.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1] / "src")]

from rich.console import Console  # noqa: E402

from soak.child import Job  # noqa: E402
from soak.results import Result, machine, show, totals  # noqa: E402
from soak.setups import ROOT, TESTS_OF, Setup, setups  # noqa: E402

ENGINES = ("transformers", "sglang", "vllm")
START_S, END_S = 400, 40
"""What an engine has to start, and after its time to come to its end, before it is killed."""
SHOWN_S = 5
"""Between two times at which ``soak.json`` is written."""

SETTINGS = {"CANARY_READ_CHECK": "64", "CANARY_LOG_FORMAT": "json"}


class Child:
    """A process with an engine."""

    def __init__(self, name: str, copy: int, args: argparse.Namespace, seconds: float) -> None:
        setup: Setup = args.every[name]
        seed = args.seed + copy
        self.name = name
        file = f"{name.replace('/', '-')}-{seed}"
        self._out = args.work / f"{file}.json"
        self._out.unlink(missing_ok=True)
        self.log = args.work / f"{file}.log"
        again = f"python3 tests/soak --device {args.device} --setups {name} --seed {seed}"
        again += f" --plant {args.plant}" if args.plant >= 0 else ""
        again += f" --python {setup.engine}={args.python[setup.engine]}" if setup.engine in args.python else ""
        self._job = Job(
            name, args.device, seed, seconds, args.until, str(self._out), again, args.first, args.rounds,
            args.plant,
        )  # fmt: skip
        self._kill_at = min(args.until, time.time() + START_S + seconds) + END_S
        with self.log.open("w") as log:
            python = args.python.get(setup.engine, sys.executable)
            self._process = subprocess.Popen(
                [python, "-m", "soak.child", json.dumps(asdict(self._job))],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(setup),
            )  # fmt: skip

    def over(self) -> bool:
        """Whether it has ended; one that is too late is killed."""
        if self._process.poll() is None and time.time() > self._kill_at:
            self._process.kill()
            self._process.wait(60)
        return self._process.poll() is not None

    def result(self) -> Result:
        """What it wrote last."""
        found = Result.read(self._out) or Result(self.name, self._job.seed, self._job.device)
        if found.state in ("starting", "serving") and self.over():
            found.state += f", ended with {self._process.returncode}"
        return found


def environment(setup: Setup) -> dict[str, str]:
    """Of an engine's process: nothing of Canary's but what is set here or by the user."""
    path = [HERE.parent, TESTS_OF[setup.engine], ROOT / "src", *(ROOT / "plugins").glob("*/src")]
    return {
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **SETTINGS, **os.environ, **setup.environment,
        "CANARY_PLUGINS": setup.engine,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip


def run(chosen: list[str], args: argparse.Namespace, console: Console) -> list[Result]:
    """So many at a time; they share the time."""
    waiting = [(name, copy) for copy in range(args.copies) for name in chosen]
    running, results = list[Child](), list[Result]()
    seconds = args.seconds / -(-len(waiting) // args.side_by_side)
    written = time.time()
    while waiting or running:
        for child in [child for child in running if child.over()]:
            running.remove(child)
            results.append(tell(child, console))
        while waiting and len(running) < args.side_by_side:
            name, copy = waiting.pop(0)
            if time.time() < args.until:
                running.append(Child(name, copy, args, seconds))
            else:
                results.append(Result(name, args.seed + copy, args.device, state="no time was left"))
        if time.time() > written + SHOWN_S:
            written = time.time()
            write([*results, *(child.result() for child in running)], args)
        time.sleep(0.2)
    return results


def write(results: list[Result], args: argparse.Namespace) -> None:
    """All of it, with the totals, as far as it is known."""
    whole = {"seed": args.seed, **machine(), "settings": SETTINGS, "totals": totals(results)}
    part = args.out / "soak.part"
    part.write_text(json.dumps({**whole, "setups": [asdict(r) for r in results]}, default=str, indent=1))
    os.replace(part, args.out / "soak.json")


def tell(child: Child, console: Console) -> Result:
    """One line of a setup that has ended, and what failed."""
    result = child.result()
    forwards = result.stats.get("forwards", 0)
    console.print(f"{result.setup}: {result.state}, {forwards} forwards in {result.traffic_s:.0f} s", highlight=False)
    for failure in result.failures[:5]:
        shown = {k: v for k, v in failure.items() if k not in ("again", "fields")}
        console.print(
            f"FAILED {result.setup} {str(shown)[:900]}\n  again: {failure['again']}", highlight=False, markup=False
        )
    if result.state != "done" and not result.left_out:
        console.print(child.log.read_text(errors="replace")[-3000:], highlight=False, markup=False)
    return result


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--setups", nargs="+", help="only these, e.g. vllm/ngram; all unless it is given")
    parser.add_argument("--list", action="store_true", help="names all setups, and ends")
    parser.add_argument("--seed", type=int, help="chosen at random unless it is given")
    parser.add_argument("--seconds", type=float, default=600, help="of traffic, for all setups together")
    parser.add_argument("--until", type=float, default=float("inf"), help="an end in any case, in seconds of the epoch")
    parser.add_argument("--rounds", type=int, help="most rounds of a setup")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--plant", type=int, default=-1, help="a round in which a bit is flipped: the soak must fail")
    parser.add_argument("--side-by-side", type=int, default=1, help="how many engines run at a time")
    parser.add_argument("--copies", type=int, default=1, help="of each setup, each with the next seed")
    parser.add_argument(
        "--python", nargs="*", default=[], metavar="ENGINE=PYTHON", help="interpreters, if not this one"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "/tmp/canary-soak")))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "canary-soak-work")
    args = parser.parse_args()
    args.python = dict(one.split("=", 1) for one in args.python)
    args.seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    if args.setups:
        args.engines = tuple(dict.fromkeys(name.partition("/")[0] for name in args.setups))
    return args


def main() -> int:
    """All that was asked for; 0 if nothing failed."""
    args = arguments()
    sys.path += [str(folder) for folder in TESTS_OF.values()]
    console = Console(width=max(200, Console().width))
    args.every = setups(args.device, tuple(args.engines))
    chosen = args.setups or list(args.every)
    unknown = [name for name in chosen if name not in args.every]
    if unknown or not chosen:
        console.print(f"no setup {' '.join(unknown)}; there are: {' '.join(args.every)}", highlight=False)
        return 2
    if args.list:
        console.print("\n".join(chosen), highlight=False)
        return 0
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    console.print(
        f"seed {args.seed}, {len(chosen) * args.copies} engines, {args.seconds:.0f} s of traffic", highlight=False
    )
    results = run(chosen, args, console)
    write(results, args)
    with (args.out / "soak.txt").open("w") as file:
        for one in (console, Console(file=file, width=220)):
            show(results, one)
            one.print(f"seed {args.seed}, results in {args.out}, logs in {args.work}", highlight=False)
    return 0 if results and all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
