"""One engine of the soak: ``python -m soak.child JOB``, started by ``python3 tests/soak`` in a process of its own.

``JOB``: a JSON object, `Job`. What it came to so far is written to ``JOB.out`` every few seconds.
"""

import gc
import json
import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from soak.noise import Noise
from soak.plan import plan
from soak.results import Result
from soak.served import Late, Served
from soak.setups import Setup, setups

WRITE_S = 2.0
"""Between two times at which the result is written."""

TOLD = (
    "ledger_matched", "ledger_unknown", "unsure", "dismissed", "withheld", "recompute_same", "recompute_differs",
    "recompute_unjudged", "recompute_unlike", "recompute_no_room", "recompute_too_short",
    "recompute_lessons", "recompute_lessons_ended", "recompute_no_lesson", "attention_looks", "attention_differs",
)  # fmt: skip
"""Counters of Canary's that are shown beside what happened: loads that were judged, and what was not told."""

POINTS = """[canary]
sglang = canary_sglang.plugin
transformers = canary_transformers.plugin
vllm = canary_vllm.plugin
[vllm.general_plugins]
canary = canary_vllm.plugin:start
[sglang.srt.plugins]
canary = canary_sglang.plugin:start
"""


@dataclass(frozen=True)
class Job:
    """``seconds``: how long the traffic lasts, once the engine is up, and ``until`` which second of the epoch at most.
    ``first``, ``rounds``: numbers of the rounds that are
    served, as far as the time allows; no end if ``rounds`` is None. ``plant``: the round in which a bit is flipped, -1
    for none. ``again``: the command that repeats it, up to the number of rounds."""

    setup: str
    device: str
    seed: int
    seconds: float
    until: float
    out: str
    again: str
    first: int = 0
    rounds: int | None = None
    plant: int = -1


class Soak:
    """Serves round after round, and judges."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.setup = find(job.setup, job.device)
        self.result = Result(job.setup, job.seed, job.device)
        self.result.settings = {k: v for k, v in os.environ.items() if k.startswith("CANARY_")}
        self._noise = Noise()
        self._out = Path(job.out)
        self._until = job.until
        self._written = 0.0
        self._told = 0
        self._troubles = 0

    def run(self) -> None:
        """All of it; whatever happens is in the result."""
        began = time.time()
        self.write()
        if (reason := self._lacking()) is not None:
            self.result.state = f"left out: {reason}"
            self.write()
            return
        try:
            engine = make(self.setup, self.job.device)
            self.result.version = engine.version
            # What is there by now is no garbage, and need not be looked through again.
            gc.collect()
            gc.freeze()
            self.result.start_s = time.time() - began
            self.result.state = "serving"
            self.write()
            began = time.time()
            self._until = min(self.job.until, began + self.job.seconds)
            try:
                self._serve(engine)
            finally:
                self.result.traffic_s = time.time() - began
            self.result.state = "done"
        except BaseException as error:
            traceback.print_exc()
            self.result.state = f"{type(error).__name__}: {error}"[:500]
        self.write()

    def _lacking(self) -> str | None:
        """Why this machine can't run the engine."""
        if self.setup.engine != "vllm" or self.job.device != "cpu":
            return None
        from vllm_on_cpu.setups import lacking

        return lacking(self.job.setup.partition("/")[2])

    def write(self) -> None:
        """The result as it is now."""
        self._written = time.time()
        self.result.write(self._out)

    def _serve(self, engine: Served) -> None:
        number, began = self.job.first, time.time()
        while time.time() < self._until and (self.job.rounds is None or number < self.job.rounds):
            try:
                self._round(engine, number)
            except Late:
                break
            finally:
                self._judge(engine, number)
                self.result.traffic_s = time.time() - began
            number += 1
            self.result.rounds += 1
            if time.time() - self._written > WRITE_S:
                self.write()

    def _round(self, engine: Served, number: int) -> None:
        asked = plan(self.setup.shape, self.job.seed, self.job.setup, number)
        compare = self.setup.repeatable and number % self.setup.compare == 0 and number != self.job.plant
        if asked.flush or compare:
            engine.counts["flushed"] += 1
            compare = engine.flush() and compare
        draw = random.Random(f"flip {self.job.seed} {number}") if number == self.job.plant else None
        answers = engine.serve(asked, self._until, flip=draw)
        self.result.requests += len(asked.asked)
        self.result.tokens += sum(map(len, answers.values()))
        if compare and engine.flush():
            self._compare(engine, number, answers)

    def _compare(self, engine: Served, number: int, answers: dict[str, list[int]]) -> None:
        """Serves the round once more, without Canary where it may be paused. Where answers differ, once more again: an
        engine that does not answer the same twice proves nothing."""
        asked = plan(self.setup.shape, self.job.seed, self.job.setup, number)
        if self.setup.pauses:
            engine.pause()
        try:
            plain = engine.serve(asked, self._until, name="-again")
            both = answers.keys() & plain.keys()
            different = [name for name in sorted(both) if answers[name] != plain[name]]
            engine.flush()
            third = engine.serve(asked, self._until, name="-third") if different else {}
            # What was written in a pause is known to nobody; it is not to be hit.
            engine.flush()
        finally:
            if self.setup.pauses:
                engine.resume()
        self.result.compared += len(both)
        unsteady = [name for name in different if third.get(name) != plain[name]]
        engine.counts["unsteady"] += len(unsteady)
        for name in [name for name in different if name not in unsteady]:
            self.result.different += 1
            self._fail(number, {"different": name, "first": answers[name], "second": plain[name]})

    def _judge(self, engine: Served, number: int) -> None:
        found = engine.violations()
        for violation in found[self._told :]:
            self._fail(number, {"found": str(violation), "fields": violation.fields()})
        self._told = self.result.violations = len(found)
        troubles = engine.witness.trouble()
        for trouble in troubles[self._troubles :]:
            self._fail(number, {"told": trouble})
        self._troubles = len(troubles)
        self.result.coverage = [str(event.fields.get("summary")) for event in engine.witness.told("coverage")]
        self.result.stats = engine.stats()
        self.result.noise = self._noise.rows()
        told = {name: self.result.stats[name] for name in TOLD if self.result.stats.get(name)}
        self.result.counts = {**engine.counts, **told}

    def _fail(self, number: int, what: dict[str, Any]) -> None:
        self.result.fail(number, f"{self.job.again} --rounds {number + 1}", what)
        self._written = 0.0


def find(name: str, device: str) -> Setup:
    """The setup of that name."""
    return setups(device, (name.partition("/")[0],))[name]


def make(setup: Setup, device: str) -> Served:
    """The engine, guarded by what ``CANARY_PLUGINS`` names. Raises `RuntimeError` if no Canary attached where the pool
    is made at the start."""
    if not entry_points(group="canary", name=setup.engine):
        # Where the plugins are on the path but not installed.
        site = Path(tempfile.mkdtemp(prefix="canary-soak-"))
        info = site / "canary_of_this_checkout-0.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: canary_of_this_checkout\nVersion: 0\n")
        info.joinpath("entry_points.txt").write_text(POINTS)
        sys.path.insert(0, str(site))
    folder = Path(tempfile.mkdtemp(prefix="canary-soak-model-"))
    engine: Served = import_module(f"soak.on_{setup.engine}").make(setup, device, folder)
    if not engine.witness.canaries and setup.engine != "transformers":
        raise RuntimeError(f"no Canary attached: {engine.witness.trouble()}")
    return engine


if __name__ == "__main__":
    Soak(Job(**json.loads(sys.argv[1]))).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of connectors keep the process alive.
    os._exit(0)
