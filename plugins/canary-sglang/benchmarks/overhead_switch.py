"""A plugin of Canary's for the benchmark: switches it off and on in a running engine, so that both are measured in one.

The scheduler's process, once guarded, writes its number to ``pid`` in the folder ``OVERHEAD_SWITCH``; on `SIGNAL` it
does what the file ``arm`` there says and writes that to ``applied``: ``off``; ``on``; ``on@0.2%``, with this budget for
the scrub. The median time of a step of the arm before, in seconds, is added to ``steps`` then, a JSON object a line.
To be sent while the engine idles; after it the prefix cache must be flushed, which tells Canary to forget
what it has not seen.
"""

import functools
import itertools
import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from canary_core import hookimpl
from canary_core.config import ScrubBudget

SIGNAL = signal.SIGUSR2
_canaries: list[tuple[Any, ScrubBudget]] = []


@hookimpl
def canary_attached(canary: Any) -> None:
    """From here on the engine listens."""
    folder = Path(os.environ["OVERHEAD_SWITCH"])
    _canaries.append((canary, canary.step.scrub.budget))
    listeners: dict[int, list[Any]] = {}

    ended = _step_ends()
    arms = ["start"]

    def switch(number: int, frame: Any) -> None:
        arm = (folder / "arm").read_text()
        steps = [later - earlier for earlier, later in itertools.pairwise(ended)]
        with (folder / "steps").open("a") as file:
            print(json.dumps({"arm": arms[-1], "steps": len(steps), "step_s": _median(steps)}), file=file)
        ended.clear()
        arms.append(arm)
        name, _, budget = arm.partition("@")
        for guard, own in _canaries:
            guard.step.scrub.budget = ScrubBudget.parse(budget) if budget else own
            # A Canary that is off closes its listeners for good; ours comes back.
            kept = listeners.setdefault(id(guard), list(guard.step.listeners))
            if not guard.step.listeners:
                for listener in kept:
                    guard.step.add(listener)
            guard._switch.enabled = name == "on"
        _write(folder / "applied", arm)

    signal.signal(SIGNAL, switch)
    _write(folder / "pid", str(os.getpid()))


def _step_ends() -> list[float]:
    """Grows by the time at which each batch of the engine was processed."""
    from sglang.srt.managers.scheduler import Scheduler

    process, ended = Scheduler.process_batch_result, []

    @functools.wraps(process)
    def timed(*args: Any, **options: Any) -> Any:
        result = process(*args, **options)
        ended.append(time.perf_counter())
        return result

    Scheduler.process_batch_result = timed
    return ended


def _median(steps: list[float]) -> float | None:
    return statistics.median(steps) if steps else None


def _write(file: Path, text: str) -> None:
    """Whoever reads the file sees all of the text."""
    draft = file.with_suffix(".new")
    draft.write_text(text)
    draft.rename(file)
