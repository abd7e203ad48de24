"""The audit (``CANARY_AUDIT``) on real SGLang engines, one after the other: a row of a table for each.

    python3 plugins/canary-sglang/tests/gpu/audit.py [--device cuda|cpu] [--forwards 8] [llama window mla dsv4]

Each engine has the real scheduler in a process of its own, with CUDA graphs for decoding. Ends with 0 if in every one
of them all audited forwards passed and nothing was found. canary-core and canary-sglang must be installed, since SGLang
finds its plugins by their entry points (on a CPU, the path suffices).
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from engines.process import EngineProcess  # noqa: E402  (found on the path that was just given)
from engines.setups import SETUPS, Setup  # noqa: E402

COMMON: dict[str, Any] = {"prompts": 8, "new_tokens": 24, "shared": 300, "patience_s": 500}
GPU = {
    "llama": Setup({"device": "cuda", "model": "gpu_llama"}, **COMMON),
    "window": Setup({"device": "cuda", "model": "gpu_cohere2"}, **COMMON),
    "mla": Setup({"device": "cuda", "model": "gpu_deepseek_v2"}, **COMMON),
    "dsv4": Setup(
        {"device": "cuda", "model": "gpu_deepseek_v4", "attention_backend": None, "max_total_tokens": 20480},
        {"SGLANG_DSV4_FP4_EXPERTS": "0"},
        **{**COMMON, "prompts": 4, "shared": 600},
    ),
}
CPU = {"llama": "mha", "window": "swa", "mla": "mla", "dsv4": "deepseek_v4"}
COLUMNS = (
    "model", "passed", "forwards", "compared", "unclaimed", "problems", "s a forward", "snapshot", "on", "graphs",
    "findings",
)  # fmt: skip


def audited(name: str, setup: Setup, forwards: int) -> dict[str, Any]:
    """Starts an engine, serves, and gives its row. Never raises."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "-")
    row |= {"model": name, "passed": False}
    process = None
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="canary-audit-", ignore_cleanup_errors=True) as folder:
            settings = {"CANARY_AUDIT": str(forwards), "CANARY_READ_CHECK": "0", "CANARY_SCRUB_BUDGET": "64MiB"}
            process = EngineProcess(setup, Path(folder), **settings)
            served = process.serve(prompts=setup.traffic(0), new_tokens=setup.new_tokens)
            answer = process.findings()
            found, stats = answer["violations"], answer["stats"]
            row |= {"forwards": stats.get("audited_forwards", 0), "unclaimed": stats.get("audit_unclaimed_bytes", "-")}
            row |= told(process.events())
            row |= {"graphs": served.get("graphed", "-"), "findings": len(found)}
            row["passed"] = row["passed"] and not found
            for violation in found[:5]:
                say({"model": name, "violation": violation})
    except Exception as error:
        row["problems"] = f"{type(error).__name__}: {str(error)[-1500:]}"
    finally:
        if process is not None:
            try:
                process.close()
            except Exception as error:
                say({"model": name, "close": repr(error)})
    say({"model": name, "seconds": round(time.monotonic() - began, 1)})
    return row


def told(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the events of an engine say of its audit."""
    by_name = {event["name"]: event for event in events}
    if "coverage" in by_name:
        say({"coverage": by_name["coverage"]["summary"], "denominator": by_name["coverage"]["denominator"]})
    event = by_name.get("audit_failed") or by_name.get("audit")
    if event is None:
        skipped = by_name.get("audit_skipped", {}).get("reason")
        return {"problems": skipped or f"the audit did not come to its end; events: {sorted(by_name)}"}
    problems = event.get("problems", [])
    return {
        "passed": event["name"] == "audit",
        "forwards": event["forwards"],
        "compared": event["compared_bytes"],
        "unclaimed": event["unclaimed_bytes"],
        "problems": "; ".join(problems) or 0,
        "s a forward": round(event["seconds"] / event["forwards"], 4),
        "snapshot": event["snapshot_bytes"],
        "on": event["snapshot_device"],
    }


def say(line: dict[str, Any]) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(line, default=str) + "\n")
    sys.stdout.flush()


def main() -> int:
    """All that were asked for; 0 if all passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--forwards", type=int, default=8)
    parser.add_argument("models", nargs="*", default=list(GPU))
    given = parser.parse_args()
    setups = GPU if given.device == "cuda" else {name: SETUPS[like] for name, like in CPU.items()}
    rows = []
    for name in given.models:
        rows.append(audited(name, setups[name], given.forwards))
        say(rows[-1])
    sys.stdout.write("\n| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS) + "\n")
    for row in rows:
        sys.stdout.write("| " + " | ".join(str(row[c]).replace("|", "/") for c in COLUMNS) + " |\n")
    return 0 if rows and all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
