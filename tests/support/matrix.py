"""Writes docs/support-matrix.md: which test of the conformance suite each plugin passes, or does not declare.

Each engine's suite runs where that engine is installed; then the page is made of what they said::

    python -m support.matrix run "toy engine" canary_toy.session:ToyConformance > toy.json
    python -m engines.conformance_results "SGLang 0.5.21 (MHA)" sglang.json  # of canary-sglang's tests
    python -m support.matrix page toy.json transformers.json sglang.json > docs/support-matrix.md
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from canary_core.testing import ABILITIES, run_suite

HEAD = """# What each plugin does

Every row is a test of the [conformance suite](plugin-author.md), run on the real engine. **yes**: it passes. An empty
cell: the plugin does not declare the ability; [why](#why-a-cell-is-empty) is below. Written by
[support/matrix.py](../tests/support/matrix.py), which says how.

"""
CELLS = {"passed": "yes", "failed": "FAILS", "undeclared": "", "not_run": "not run"}


def run(engine: str, suite: str) -> dict[str, Any]:
    """What became of the suite ``module:Class``, under the heading ``engine``."""
    module, _, name = suite.partition(":")
    outcomes = run_suite(getattr(importlib.import_module(module), name))
    return {"engine": engine, "outcomes": [outcome.fields() for outcome in outcomes]}


def page(results: list[dict[str, Any]]) -> str:
    """The table: a row for each test, those that every plugin must pass first, then by ability."""
    tests: dict[str, dict[str, Any]] = {}
    for result in results:
        tests.update((o["test"], o) for o in result["outcomes"])
    order = {ability: i for i, ability in enumerate((None, *ABILITIES))}
    rows = sorted(tests.values(), key=lambda test: order[test["ability"]])
    lines = [HEAD + "| what | ability | " + " | ".join(r["engine"] for r in results) + " |"]
    lines.append("|---|---|" + "---|" * len(results))
    for test in rows:
        cells = [_cell(result, test["test"]) for result in results]
        ability = f"`{test['ability']}`" if test["ability"] else "every plugin"
        lines.append(f"| {test['what']} | {ability} | {' | '.join(cells)} |")
    lines += ["", "## Why a cell is empty", "", "| engine | ability | why |", "|---|---|---|"]
    for result in results:
        lacking = {o["ability"]: o["message"] for o in result["outcomes"] if o["result"] == "undeclared"}
        for ability in (ability for ability in order if ability in lacking):
            reason = lacking[ability].partition(" is not declared: ")[2]
            lines.append(f"| {result['engine']} | `{ability}` | {reason} |")
    return "\n".join(lines) + "\n"


def _cell(result: dict[str, Any], test: str) -> str:
    return next((CELLS[o["result"]] for o in result["outcomes"] if o["test"] == test), "")


def main() -> None:
    """See the module."""
    what, *arguments = sys.argv[1:]
    if what == "run":
        json.dump(run(*arguments), sys.stdout)
    else:
        sys.stdout.write(page([json.loads(Path(path).read_text(encoding="utf-8")) for path in arguments]))


if __name__ == "__main__":
    main()
