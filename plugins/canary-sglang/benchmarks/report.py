"""Results as markdown tables: ``python3 report.py overhead.jsonl junit.xml ...``, in any order and number.

``.jsonl`` is what `overhead` writes; ``.xml`` what ``pytest --junitxml`` writes of `tests/gpu`.
"""

import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from workloads import CONFIGS, OFF

DRAWS = 4000
METRICS = {"prefill_tokens_s": "prefill", "decode_tokens_s": "decode", "steps_s": "median decode step, per s"}

Series = list[float]


def overhead(results: Sequence[dict[str, Any]]) -> str:
    """A row for each workload, metric, engine and arm: median, spread, and the share lost with its 95 % range.
    An arm is compared with ``off`` of the same engine, pair by pair; another engine with the engine ``off``. Says so
    where Canary wasn't on throughout."""
    rates: dict[tuple[str, str, str, str], dict[int, float]] = defaultdict(dict)
    for r in results:
        for metric in METRICS:
            if metric in r:
                rates[r["workload"], metric, r["config"], r["arm"]][r["turn"]] = r[metric]
    lines = [
        "| workload | tokens/s | engine | median | least - most | n | lost | 95 % range |",
        "|---|---|---|---|---|---|---|---|",
    ]
    labels = {r["workload"]: r["label"] for r in results if "label" in r}
    for (workload, metric, config, arm), by_turn in sorted(rates.items(), key=lambda item: _rank(item[0])):
        values = list(by_turn.values())
        base_arm = rates.get((workload, metric, config, OFF), {})
        base_engine = list(rates.get((workload, metric, "off", OFF), {}).values())
        lost = ("", "")
        if arm != OFF:
            lost = _lost_in_pairs([(base_arm[t], v) for t, v in by_turn.items() if t in base_arm])
        elif config != "off" and base_engine:
            lost = _lost_between(base_engine, values)
        title = CONFIGS[config].title + (
            {"on": "", OFF: ", switched off"}.get(arm, f", {arm}") if config == "ours" else ""
        )
        spread = f"{min(values):,.0f} - {max(values):,.0f}"
        lines.append(
            f"| {labels[workload]} | {METRICS[metric]} | {title} | {statistics.median(values):,.0f} | {spread} | "
            f"{len(values)} | {lost[0]} | {lost[1]} |"
        )
    for r in results:
        if "events" in r:
            lines += ["", f"Canary's events: {r['events']}; counters: {r['stats']}"]
        if "disabled" in r.get("events", {}):
            lines += ["", "NOT WHAT CANARY COSTS: it switched itself off, see `disabled` in the log of ours."]
    return "\n".join(lines)


def tests(files: Sequence[Path]) -> str:
    """A row for each engine: what passed, and what its tests recorded."""
    engines: dict[str, list[ElementTree.Element]] = defaultdict(list)
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            name, _, inside = case.get("name", "").partition("[")
            if inside or "/gpu" in case.get("classname", "").replace(".", "/"):
                engines[inside.rstrip("]").split("-")[0] or name].append(case)
    lines = [
        "| engine | passed | failed | skipped | faults | flipped sources | clean forwards | CUDA graphs | guarded |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for engine, cases in engines.items():
        told = {p.get("name", ""): p.get("value", "") for case in cases for p in case.iter("property")}
        good = [case for case in cases if not _bad(case)]
        faults = sum("test_every_fault" in case.get("name", "") for case in good)
        counts = [sum(_bad(case) == kind for case in cases) for kind in ("", "failed", "skipped")]
        recorded = [told.get(key, "") for key in ("flipped_sources", "steps", "graphed", "coverage_ratio")]
        lines.append("| " + " | ".join(str(cell) for cell in (engine, *counts, faults or "", *recorded)) + " |")
    return "\n".join(lines)


def _bad(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else ""


def _rank(key: tuple[str, str, str, str]) -> tuple[Any, ...]:
    workload, metric, config, arm = key
    return workload, list(METRICS).index(metric), config != "off", list(CONFIGS).index(config), arm != OFF, arm


def _lost_in_pairs(pairs: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """Median of the pairs' losses."""
    losses = [1 - rate / base for base, rate in pairs]
    return _percent(losses, lambda rng: statistics.median(rng.choices(losses, k=len(losses))), statistics.median)


def _lost_between(base: Series, values: Series) -> tuple[str, str]:
    """Loss of the median."""

    def draw(rng: random.Random) -> float:
        drawn = [statistics.median(rng.choices(series, k=len(series))) for series in (values, base)]
        return 1 - drawn[0] / drawn[1]

    return _percent([1 - statistics.median(values) / statistics.median(base)], draw, statistics.median)


def _percent(
    losses: Series, draw: Callable[[random.Random], float], middle: Callable[[Series], float]
) -> tuple[str, str]:
    if not losses:
        return "", ""
    rng = random.Random(0)
    drawn = sorted(draw(rng) for _ in range(DRAWS))
    low, high = drawn[DRAWS * 25 // 1000], drawn[DRAWS * 975 // 1000]
    return f"{100 * middle(losses):.2f} %", f"{100 * low:.2f} to {100 * high:.2f} %"


def main() -> None:
    """Tables of all files."""
    files = [Path(name) for name in sys.argv[1:]]
    lines = [line for file in files if file.suffix == ".jsonl" for line in file.read_text().splitlines()]
    if lines:
        print(overhead([json.loads(line) for line in lines]) + "\n")
    junit = [file for file in files if file.suffix == ".xml"]
    if junit:
        print(tests(junit))


if __name__ == "__main__":
    main()
