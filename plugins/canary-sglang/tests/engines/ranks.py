"""Engines with two ranks, each a process of SGLang's own, run by `engines.ranks_script`: what is sent, and what the
ranks wrote down."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines import TESTS, command, python_path, run_to_end


def phase(control: str, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Requests that are sent together, and what rank 1 suffers meanwhile."""
    return {"control": control, "prompts": prompts, "new_tokens": new_tokens}


def serve(
    folder: Path,
    options: dict[str, Any],
    phases: list[dict[str, Any]],
    plugins: Sequence[str] = (),
    **settings: str,
) -> list[Any]:
    """What came of each phase. ``plugins``: SGLang's own, as entry points. Raises `AssertionError` where the engine
    fails."""
    done = run(folder, options, phases, plugins, **settings)
    lines = folder.joinpath("log").read_text(errors="replace").splitlines()
    assert done == 0, "\n".join(lines[-40:])
    return [json.loads(line.removeprefix("PHASE ")) for line in lines if line.startswith("PHASE ")]


def run(
    folder: Path,
    options: dict[str, Any],
    phases: list[dict[str, Any]],
    plugins: Sequence[str] = (),
    **settings: str,
) -> int:
    """As `serve`; gives the exit status."""
    folder.mkdir()
    points = "[canary]\nranks_witness = tools.ranks_witness\n"
    points += "".join(f"{line}\n" for line in ("[sglang.srt.plugins]", *plugins))
    info = folder / "ranks_witness-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: ranks-witness\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text(points)
    folder.joinpath("phases.json").write_text(json.dumps(phases))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_") and k != "TRITON_INTERPRET"}
    cores = sorted(os.sched_getaffinity(0))
    known = {
        "PYTHONPATH": python_path(folder, TESTS / "cpu"),
        "RANKS_FOLDER": str(folder),
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "OMP_NUM_THREADS": "1",
        # Other tests share the GPUs, in other amounts.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    }

    def begin() -> None:
        for file in (*folder.glob("rank*.jsonl"), folder / "flips"):
            file.unlink(missing_ok=True)

    arguments = command("ranks_script", str(folder), json.dumps(options))
    return run_to_end(arguments, folder / "log", {**inherited, **known, **settings}, 800, begin)


def told(folder: Path, rank: int, key: str) -> list[Any]:
    """What a rank wrote down under ``key``: values of ``forward`` and ``violation``, events whole."""
    lines = [json.loads(line) for line in folder.joinpath(f"rank{rank}.jsonl").read_text().splitlines()]
    return [line if key in ("event", "broken") else line[key] for line in lines if key in line]
