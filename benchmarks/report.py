"""What was measured, as a table, as markdown and as a plot; all from the dict that ``--json`` writes."""

import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.start import held_up
from canary_core import __version__

Report = dict[str, Any]
MOST_LAUNCHES = 4
MOST_HOST_CALLS = 2.5
"""Host time of a forward in calls of `torch.mm`: 40 µs where one takes 16."""
HOSTS = {
    "served": "as engines run decodes (default settings, Overlap.NEXT)",
    "scrubbed": "with a scrub after each forward, and Overlap.ALL",
}
"""What is said of each measurement of the host's time; the first one has the bar."""
MOST_START_S = {"cold": 3.0, "warm": 0.5}
STARTS = {
    "cold": "a start with an empty Triton cache holds an engine up for {total:.2f} s: {attach:.2f} to attach, "
    "{warm_up:.2f} for what can't be put off, {finish:.2f} before the first forward. In between another process "
    "compiles for {beside:.2f} s; an engine that asks for its first forward sooner waits for the rest",
    "warm": "a start with a full Triton cache holds it up for {total:.2f} s",
    "here": "a start with an empty one that puts nothing off takes {total:.2f} s",
}
"""What is said of each measurement of `benchmarks.start`."""
ABOUT = """\
Times are medians of CUDA-graph replays of several launches. Inputs are used in rotation, so that they come from
memory and not from the cache; *in L2* is the same launch again and again on one batch that fits the cache. *bytes* is
the least that has to be moved: each input read once, each output written once (a record is one 32-byte sector).
*gather* reads the same rows in the same order and does nothing with them: what the memory gives for such rows. The
built-in's times are of one lane with at most one layer's half, as the built-in does it (a full pool has two lanes,
beside a windowed one four); ours are of everything that the case says. What `record` reads was just written by
`check`, so it is in the cache here, as it is in an engine."""
HEADER = (
    "case", "bytes", "µs (p10–p90)", "GB/s", "of peak read", "in L2, µs", "gather, µs", "built-in, µs", "× slower",
    "bar", "",
)  # fmt: skip


def machine() -> Report:
    """The GPU and the versions of everything that matters."""
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "memory_gib": round(gpu.total_memory / 2**30),
        "multiprocessors": gpu.multi_processor_count,
        "l2_mb": round(gpu.L2_cache_size / 1e6),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": metadata.version("triton"),
        "canary": __version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def rows(report: Report) -> list[tuple[str, ...]]:
    """One row of `HEADER`'s columns per case."""
    peak = report["peak"]["read_gbps"]
    return [_row(result, peak) for result in report["results"]]


def notes(report: Report) -> list[str]:
    """What was refused, or could not be compared, and why."""
    found = [f"{r['name']}: no speed: {r['refused']}" for r in report["results"] if r["refused"]]
    found += [f"{r['name']}: no comparison: {r['peer_note']}" for r in report["results"] if r["peer_note"]]
    steps: Report = report.get("steps", {})
    found += [f"{name}: no speed: {step['refused']}" for name, step in steps.items() if "refused" in step]
    return found + ([f"built-in: {report['peer_note']}"] if report.get("peer_note") else [])


def facts(report: Report) -> list[str]:
    """Everything that is not a case: whole forwards, host time, launches, memory, one sentence each."""
    found = []
    for name, step in report.get("steps", {}).items():
        if "refused" not in step:
            times = f"pre_forward {step['pre_us']:.1f} µs, post_forward {step['post_us']:.1f} µs on the device"
            found.append(f"{name}: {step['work']}: {times}")
    for kind, host in report.get("host_us", {}).items():
        calls = host["all"] / host["one_mm"]
        bar = f"; bar ≤ {MOST_HOST_CALLS:g}: {_yes(calls <= MOST_HOST_CALLS)}" if kind == "served" else ""
        found.append(
            f"host time per forward in our hooks, device busy, {HOSTS[kind]}: {host['all']:.1f} µs (pre_forward "
            f"{host['pre_forward']:.1f}, post_forward {host['post_forward']:.1f}, end_step {host['end_step']:.1f}; "
            f"90th percentile of single forwards {host['all_p90']:.1f}). One call of torch.mm takes this host "
            f"{host['one_mm']:.1f} µs, so that is {calls:.1f} of them{bar}"
        )
    if launches := report.get("launches"):
        kernels = {n: c for n, c in launches.items() if not n.startswith("Mem")}
        copies = {n: c for n, c in launches.items() if n.startswith("Mem")}
        listed = ", ".join(f"{n} × {c:g}" for n, c in kernels.items())
        copied = ", ".join(f"{n} × {c:g}" for n, c in copies.items()) or "none"
        total = sum(kernels.values())
        found.append(
            f"kernel launches per forward (decode, full pool): {total:g} ({listed}); copies: {copied}; bar ≤ "
            f"{MOST_LAUNCHES}: {_yes(total <= MOST_LAUNCHES)}"
        )
    for kind, seconds in report.get("start", {}).items():
        total, told = held_up(seconds), STARTS[kind]
        if kind in MOST_START_S:
            told += f"; bar ≤ {MOST_START_S[kind]:g} s: {_yes(total <= MOST_START_S[kind])}"
        found.append(told.format(total=total, **seconds))
    if memory := report.get("memory"):
        found.append(
            f"device memory for a Llama-8B pool of {memory['slots']:,} slots: {memory['our_bytes'] / 1e6:.0f} MB, "
            f"{memory['share']:.2%} of the pool's {memory['pool_bytes'] / 1e9:.0f} GB (computed on torch's meta "
            f"device, nothing of it allocated); bar {memory['bar']}: {_yes(memory['met'])}"
        )
    if states := report.get("states"):
        found.append(
            f"recurrent states, {states['shape']} = {states['bytes'] / 1e9:.1f} GB: a decode step that is looked at "
            f"{states['fingerprint_us']:.0f} µs to fingerprint them and {states['compare_us']:.0f} µs to compare them "
            f"before the next ({states['gbps']:.0f} GB/s); one in {states['interval']} looked at, "
            f"{states['average_us']:.1f} µs a step on average, launches included"
        )
    return found


def show(report: Report, console: Console) -> None:
    """The terminal's view."""
    peak = report["peak"]
    console.print(f"measured peak: read {peak['read_gbps']:.0f} GB/s, copy {peak['copy_gbps']:.0f} GB/s")
    table = Table()
    for name in HEADER:
        table.add_column(name, justify="left" if name == "case" else "right", overflow="fold")
    for row in rows(report):
        table.add_row(*row)
    console.print(table)
    for name, points in report.get("curves", {}).items():
        console.print(f"whole forward against {name}: " + ", ".join(_point(p) for p in points))
    for line in (*facts(report), *notes(report)):
        console.print(line, markup=False)


def markdown(report: Report, plot: str | None = None) -> str:
    """docs/benchmarks.md."""
    m, peak = report["machine"], report["peak"]
    peer = f"SGLang {report['peer_version']}" if report.get("peer_version") else "not run"
    size = f"{m['memory_gib']} GiB, {m['multiprocessors']} multiprocessors, {m['l2_mb']} MB of L2"
    measured = f"read {peak['read_gbps']:.0f} GB/s (`torch.sum` over 8 GiB), copy {peak['copy_gbps']:.0f} GB/s"
    works = {r["name"]: r["work"] for r in report["results"]}
    lines = [
        "# Benchmarks",
        "",
        "Written by `python -m benchmarks`; do not edit. Every speed is of an op whose results were, bit for bit,",
        "those of its torch reference on the same data, clean and with faults, in the same run.",
        "",
        f"One {m['gpu']} ({size}), {m['date']}.",
        f"Python {m['python']}, torch {m['torch']}, CUDA {m['cuda']}, triton {m['triton']}, canary-core {m['canary']}",
        f"at {m['commit']}, built-in: {peer}. Command: `{report['command']}`.",
        "",
        f"Measured peak in this run: {measured} (read plus written).",
        "",
        ABOUT,
        "",
        *_table(HEADER, rows(report)),
        "",
        *(f"- `{name}`: {work}" for name, work in works.items()),
        "",
        "## A whole forward",
        "",
        *(f"- {line}" for line in facts(report)),
    ]
    for name, points in report.get("curves", {}).items():
        cells = [
            (f"{p['x']:,}", p["refused"], "", "")
            if "refused" in p
            else (f"{p['x']:,}", f"{p['pre_us']:.1f}", f"{p['post_us']:.1f}", f"{p['whole_us']:.1f}")
            for p in points
        ]
        title = name.replace("_", " ")
        lines += [
            "",
            f"### Against {title}",
            "",
            *_table((title, "pre_forward, µs", "post_forward, µs", "both"), cells),
        ]
    if plot:
        lines += ["", f"![Cost of a forward against pool size and context]({plot})"]
    if found := notes(report):
        lines += ["", "## Not measured", "", *(f"- {line}" for line in found)]
    return "\n".join(lines) + "\n"


def draw(report: Report, path: Path) -> None:
    """Cost of a forward against pool size and context, as a picture. Needs matplotlib."""
    import matplotlib  # type: ignore[import-not-found]

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # type: ignore[import-not-found]

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, (name, points) in zip(axes, report["curves"].items(), strict=True):
        good = [p for p in points if "refused" not in p]
        for key, label in (("pre_us", "pre_forward"), ("post_us", "post_forward"), ("whole_us", "both")):
            axis.plot([p["x"] for p in good], [p[key] for p in good], marker="o", label=label)
        axis.set_xscale("log")
        axis.set_xlabel(name.replace("_", " "))
        axis.grid(alpha=0.3)
    # Once both have their points: set earlier, it would fix the shared axis to what one of them needs.
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("device time of a forward's hooks, µs")
    axes[0].legend()
    figure.suptitle(f"Canary on one {report['machine']['gpu']}, scrub of 16 MiB a forward")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def command() -> str:
    """How this process was started."""
    return " ".join(["python -m benchmarks", *sys.argv[1:]])


def _row(r: Report, peak: float) -> tuple[str, ...]:
    if r["refused"]:
        return (r["name"], "", "refused", "", "", "", "", "", "", r["bar"], "✗")
    peer = r["peer_us"]
    return (
        r["name"],
        _bytes(r["bytes"]),
        f"{r['us']:.1f} ({r['low_us']:.1f}–{r['high_us']:.1f})",
        f"{r['gbps']:.0f}",
        f"{r['gbps'] / peak:.0%}",
        _maybe(r["resident_us"], lambda us: f"{us:.1f}"),
        _maybe(r.get("gather_us"), lambda us: f"{us:.1f}"),
        " + ".join(f"{op} {us:.1f}" for op, us in peer.items()),
        f"{sum(peer.values()) / r['us']:.1f}" if peer else "",
        r["bar"],
        _maybe(r["met"], _yes),
    )


def _point(p: Report) -> str:
    return f"{p['x']:,}: " + ("refused" if "refused" in p else f"{p['pre_us']:.1f} + {p['post_us']:.1f} µs")


def _maybe(value: Any, shown: Callable[[Any], str]) -> str:
    return "" if value is None else shown(value)


def _yes(met: bool) -> str:
    return "✓" if met else "✗"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _table(header: tuple[str, ...], cells: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *cells)]


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "an unknown commit"
    return found.stdout.strip()
