"""``python -m benchmarks``: see ``--help``. Needs an NVIDIA GPU, but for ``--list`` and ``--from``."""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import report as reports
from benchmarks.cases import CASES, Case
from benchmarks.step import STEPS

QUICK_BUDGET_S = 0.15
FULL_BUDGET_S = 0.5
QUICK = {"memory", *(case.name for case in (*CASES.values(), *STEPS.values()) if case.quick)}
OTHERS = {
    "curves": "device time of a forward's hooks against pool size and context",
    "start": "how long a start is held up, with an empty Triton cache and with a full one",
    "memory": "our share of a Llama-8B pool of 1M slots",
    "states": "decode of 64 requests with recurrent states of Qwen3-Next's shape, looked at and on average",
}
console = Console(width=None if sys.stdout.isatty() else 200)


def main(arguments: list[str] | None = None) -> int:
    """Runs what was asked for; gives the exit code: 0, 1 if an op was refused a speed, 2 if nothing could run."""
    args = parser().parse_args(arguments)
    names = [*CASES, *STEPS, *OTHERS]
    wanted = [n for n in names if not args.only or any(only in n for only in args.only)]
    if not wanted:
        console.print(f"--only {' '.join(args.only)} matches none of: {', '.join(names)}", markup=False)
        return 2
    if args.list:
        show_list(wanted)
        return 0
    if args.source:
        return finish(json.loads(Path(args.source).read_text()), args)
    if not torch.cuda.is_available():
        console.print(
            "Benchmarks need an NVIDIA GPU, and torch.cuda.is_available() is False: run them where there is one, with "
            "make bench GPU_PYTHON=<a Python with a CUDA build of torch>. --list and --from work here.",
            markup=False,
        )
        return 2
    return finish(run(wanted, args), args)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks", description="What Canary costs on a GPU, op by op.")
    p.add_argument("--list", action="store_true", help="list the cases; needs no GPU")
    p.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="cases with NAME in their name; repeatable"
    )
    p.add_argument("--quick", action="store_true", help="the main cases, shorter, and no curves")
    p.add_argument(
        "--builtin", action=argparse.BooleanOptionalAction, default=True,
        help="run SGLang's built-in canary beside ours, if it is installed",
    )  # fmt: skip
    p.add_argument("--json", metavar="PATH", help="write all raw numbers")
    p.add_argument("--from", dest="source", metavar="PATH", help="render such a file, measure nothing; needs no GPU")
    p.add_argument("--markdown", metavar="PATH", help="write the page docs/benchmarks.md")
    p.add_argument("--plot", metavar="PATH", help="draw cost against pool size and context; needs matplotlib")
    return p


def show_list(names: list[str]) -> None:
    """The registry as a table."""
    table = Table("case", "ops", "layout", "bar", "built-in", "what")
    for name in names:
        case = CASES.get(name) or STEPS.get(name)
        if case is None:
            table.add_row(name, "", "", "", "", OTHERS[name])
            continue
        bar, peer = str(case.bar or ""), " + ".join(case.peer)
        table.add_row(name, " ".join(case.ops), case.layout, bar, peer, case.work)
    console.print(table)


def run(wanted: list[str], args: argparse.Namespace) -> reports.Report:
    """Measures everything in ``wanted``."""
    from benchmarks import start, states, step
    from benchmarks.measure import Result, measure
    from benchmarks.timing import peak_read_gbps

    budget_s = QUICK_BUDGET_S if args.quick else FULL_BUDGET_S
    report: reports.Report = {"machine": reports.machine(), "command": reports.command(), "results": []}
    chosen = [n for n in wanted if args.only or not args.quick or n in QUICK]
    cases = [CASES[n] for n in chosen if n in CASES]
    modules, compiling = None, None
    if args.builtin and any(case.peer for case in cases):
        from benchmarks import peer

        try:
            modules = peer.load()
            compiling = peer.compile_ahead(modules)
            report["peer_version"] = _version("sglang")
        except peer.PeerUnavailableError as error:
            report["peer_note"] = str(error)
    report["peak"] = peak_read_gbps()

    results = {}
    # Those without a counterpart first: meanwhile the built-in's kernels are compiled.
    for case in sorted(cases, key=lambda c: bool(c.peer)):
        if case.peer and compiling:
            compiling.shutdown()
            compiling = None
        with _section(case.name):
            try:
                results[case.name] = measure(case, modules, budget_s)
            except Exception as error:  # one case that fails must not cost the others
                console.print(traceback.format_exc(), markup=False)
                results[case.name] = Result(case.name, case.work, bar=str(case.bar or ""), refused=f"failed: {error!r}")
        report["results"] = [results[c.name].to_dict() for c in cases if c.name in results]
        save(report, args)
    _whole_steps(report, [STEPS[n] for n in chosen if n in STEPS], budget_s)
    save(report, args)
    others: dict[str, Callable[[], Any]] = {
        "curves": lambda: step.curves(budget_s),
        "start": start.measure,
        "memory": step.memory,
        "states": lambda: states.measure(budget_s=budget_s),
    }
    for name in [name for name in others if name in chosen]:
        with _section(name):
            try:
                report[name] = others[name]()
            except Exception:
                console.print(traceback.format_exc(), markup=False)
                report.setdefault("failed", []).append(name)
        save(report, args)
    return report


def finish(report: reports.Report, args: argparse.Namespace) -> int:
    """Shows and writes a report."""
    save(report, args)
    reports.show(report, console)
    if args.plot:
        try:
            reports.draw(report, Path(args.plot))
        except ImportError:
            console.print("no plot: matplotlib is not installed; pip install matplotlib, then --from the JSON file")
            args.plot = None
    if args.markdown:
        plot = Path(args.plot).name if args.plot else None
        Path(args.markdown).write_text(reports.markdown(report, plot))
    points = [p for curve in report.get("curves", {}).values() for p in curve]
    if report.get("failed"):
        console.print(f"failed, see above: {', '.join(report['failed'])}", markup=False)
        return 1
    return 1 if any(r.get("refused") for r in (*report["results"], *report.get("steps", {}).values(), *points)) else 0


def save(report: reports.Report, args: argparse.Namespace) -> None:
    """Writes the raw numbers so far: a run that is cut short leaves what it had."""
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


def _whole_steps(report: reports.Report, steps: list[Case], budget_s: float) -> None:
    from benchmarks import step

    for case in steps:
        with _section(case.name):
            try:
                whole = step.Step(case, torch.device("cuda"))
                times = whole.times(budget_s)
                report.setdefault("steps", {})[case.name] = {"work": case.work, **times}
                whole.canary.close()
                del whole
                if case is step.DECODE:
                    logging = step.Step(case, torch.device("cuda"), "log")
                    report["host_us"] = {name: logging.host_us(name == "served") for name in reports.HOSTS}
                    report["launches"] = logging.launches()
                    logging.canary.close()
                    del logging
            except Exception as error:
                console.print(traceback.format_exc(), markup=False)
                report.setdefault("steps", {})[case.name] = {"work": case.work, "refused": repr(error)}


class _section:
    """Says how long a part took, and frees its memory before the next."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        console.print(f"  {self._name}: done in {time.perf_counter() - self._start:.1f} s", markup=False)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"


if __name__ == "__main__":
    sys.exit(main())
