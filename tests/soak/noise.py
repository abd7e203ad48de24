"""The noise of engines: errors by layer of requests that were computed again, a row for each setup of a soak.

    CANARY_RECOMPUTE=100% python3 tests/soak ...
    PYTHONPATH=tests python3 -m soak.noise SOAK_JSON... [--plot PNG]

An error is the largest median of 32 tokens in a row, relative L2, in the worse half of a layer.
"""

import argparse
import json
import statistics
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canary_core import Patches, RecomputeJudge, Verification

MOST = 4000
"""Requests of an engine whose errors are kept: the first ones."""


@dataclass
class Layer:
    """Of each request one error, and the last bound."""

    errors: "array[float]" = field(default_factory=lambda: array("d"))
    bound: float | None = None

    def row(self) -> dict[str, float | None]:
        """Number of requests, minimum, median and maximum of their errors, and the bound."""
        low, high = min(self.errors), max(self.errors)
        return {
            "requests": len(self.errors), "min": low, "median": statistics.median(self.errors), "max": high,
            "bound": self.bound,
        }  # fmt: skip


class Noise:
    """Hears each verdict of this process."""

    def __init__(self) -> None:
        self._layers: dict[int, Layer] = {}
        Patches().follow(RecomputeJudge, "verdict", self._verdict)

    def _verdict(self, answer: Verification, *_: Any, **__: Any) -> None:
        worst: dict[int, tuple[float, float | None]] = {}
        for one in answer.layers:
            worst[one.layer] = max(worst.get(one.layer, (0.0, None)), (one.worst, one.bound), key=lambda pair: pair[0])
        for number, (error, bound) in worst.items():
            layer = self._layers.setdefault(number, Layer())
            if len(layer.errors) < MOST:
                layer.errors.append(error)
            layer.bound = layer.bound if bound is None else bound

    def rows(self) -> dict[str, dict[str, float | None]]:
        """By layer."""
        return {str(number): layer.row() for number, layer in sorted(self._layers.items())}


def table(setups: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, of setups with figures: the first and the last layer."""
    lines = ["| setup | computed again | layer 0: min, median, max | bound | last layer: min, median, max | bound |"]
    lines.append("|---|---|---|---|---|---|")
    for one in setups:
        rows = list(one["noise"].values())
        cells = [one["setup"], f"{rows[0]['requests']:,}"]
        for row in (rows[0], rows[-1]):
            cells += [", ".join(f"{row[name]:.2g}" for name in ("min", "median", "max"))]
            cells += ["" if row["bound"] is None else f"{row['bound']:.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


BROKEN = {
    "float32: a decode a token short": (1.2e-4, 1.2e-2),
    "float32: a weight 1 to 5 % larger": (9.9e-3, 4.5e-2),
    "5 % noise in one head": (3e-2, 3e-2),
    "positions one too many": (0.38, 0.41),
    "a layer skipped": (0.63, 0.92),
    "vLLM's own garbage": (1.4, 1.4),
}
"""Least and largest errors of what was broken, by the tables of docs/verify.md and docs/found.md."""


def draw(setups: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Of each setup the median and largest error of the last layer, and the bound; below, what is broken. Needs
    matplotlib."""
    import matplotlib  # type: ignore[import-not-found]

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # type: ignore[import-not-found]

    last = {one["setup"]: list(one["noise"].values())[-1] for one in setups}
    names = [*last, *BROKEN]
    figure, axis = plt.subplots(figsize=(9, 0.32 * len(names) + 1))
    for y, row in enumerate(last.values()):
        axis.plot([row["median"], row["max"]], [y, y], "o-", color="tab:blue", markersize=4, linewidth=1)
        if row["bound"] is not None:
            axis.plot(row["bound"], y, "k|", markersize=12)
    for y, ends in enumerate(BROKEN.values(), len(last)):
        axis.plot(ends, [y, y], "x-", color="tab:red", markersize=5, linewidth=1)
    axis.set_xscale("symlog", linthresh=1e-8)
    axis.set_xlim(left=-2e-9)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel("relative L2 error: clean traffic, median and largest (blue), bound (|), broken (red)", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Prints the table, and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="SOAK_JSON")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    args = parser.parse_args()
    setups = [one for file in args.files for one in json.loads(file.read_text())["setups"] if one.get("noise")]
    sys.stdout.write(table(setups) + "\n")
    if args.plot is not None:
        draw(setups, args.plot)


if __name__ == "__main__":
    main()
