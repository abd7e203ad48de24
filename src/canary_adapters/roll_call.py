"""`RollCall`: the guarded workers of an engine, as seen by its scheduler's process."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence

from canary_core import AttachError, Canary, CanaryConfig, Event, emit
from canary_core.config.shown import settings

Answer = Mapping[str, object]
"""A worker's word on its guard, see `answer`: plain values, since the worker may run another version of Canary."""

OF_A_PROCESS = frozenset(
    f"CANARY_{name}"
    for name in (
        "RANK", "REPLICA", "MODEL", "SERVED_MODEL", "INCIDENT_DIR", "METRICS", "METRICS_LISTEN", "CONTROL",
        "CONTROL_DIR", "LOG_FORMAT", "LOG_LEVEL",
    )
)  # fmt: skip
"""Settings allowed to differ between processes: they do not change the guard."""

PATIENCE = 3
"""Consecutive outputs without a mark that prove a worker without a guard."""

Mark = tuple[int, bool, int, int]
"""A worker's word beside an output: its rank, whether its Canary is on, a number of the Canary's own, and the tokens
given to the worker to compute under that Canary."""


def answer(
    config: CanaryConfig | None, version: str, canary: Canary | None, reason: str = "", plugin: str = ""
) -> dict[str, object]:
    """The word of this worker. ``config``: None where ``plugin`` is not on. ``version``: of Canary and the engine's
    plugin. ``canary``: its guard, None without one, for ``reason``; empty for a worker with nothing to guard."""
    if config is None:
        config = CanaryConfig.load()
        reason = f"CANARY_PLUGINS={','.join(config.plugins)!r} does not name {plugin}"
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "version": version,
        "settings": own_settings(config),
        "enabled": canary is not None and canary.enabled,
        "coverage_ratio": None if canary is None else round(canary.coverage.ratio, 6),
        "missing": reason or ("" if canary is None or canary.enabled else "an error switched its Canary off"),
    }


def own_settings(config: CanaryConfig) -> dict[str, str]:
    """The settings that must be the same in all processes of an engine, by variable."""
    return {s.variable: s.value for s in settings(config) if s.variable not in OF_A_PROCESS}


class RollCall:
    """The workers of one engine: `take` their answers once, after the engine's start, and look at the `output` of each
    step. Problems are reported in ``workers_unguarded`` events, each sort once for each rank; in raise mode
    `AttachError` is raised, too, so that the engine stops.

    ``config``, ``version``: those of this process. ``replica``: data-parallel index of the engine. ``advice``: a
    sentence on how settings reach workers of this engine. ``tell``: receives the events.
    """

    def __init__(
        self,
        config: CanaryConfig,
        version: str,
        replica: int = 0,
        advice: str = "",
        tell: Callable[[Event], None] = emit,
    ) -> None:
        self._config = config
        self._version = version
        self._replica = replica
        self._advice = advice
        self._tell = tell
        self._unmarked = 0
        self._before: tuple[int, int] | None = None
        self._told: set[str] = set()

    def take(self, answers: Sequence[Answer | None], workers: int) -> None:
        """``answers``: one of each worker, by rank. ``workers``: how many the engine has."""
        problems = {rank: self._problem(given or {}) for rank, given in enumerate(answers)}
        problems |= dict.fromkeys(range(len(answers), workers), "gave no answer")
        self._say({rank: problem for rank, problem in problems.items() if problem}, workers)

    def output(self, mark: Mark | None, tokens: int) -> None:
        """An output of ``tokens`` scheduled tokens has come; ``mark``: its worker's word, None for none. Outputs come
        in the order scheduled."""
        if not tokens:
            return
        if mark is None:
            self._unmarked += 1
            self._before = None
            if self._unmarked == PATIENCE:
                self._say_once("no mark", None, f"{PATIENCE} outputs came without the mark of a guard")
            return
        rank, enabled, guard, computed = mark
        before, self._before, self._unmarked = self._before, (guard, computed), 0
        if not enabled:
            self._say_once("off", rank, "its Canary was switched off: see the disabled event of that process")
        if before is not None and before[0] == guard and computed - before[1] != tokens:
            what = f"was given {computed - before[1]} tokens to compute where {tokens} were scheduled"
            self._say_once("tokens", rank, f"{what}: some of the scheduler's outputs do not reach its guard")

    def _problem(self, given: Answer) -> str:
        """Problem of a worker, empty for none."""
        if not given:
            return "gave no answer"
        where = f"process {given['process']} on {given['host']}: " if "process" in given and "host" in given else ""
        if given.get("missing"):
            return f"{where}{given['missing']}"
        if given.get("version") != self._version:
            return f"{where}runs canary {given.get('version')}, the scheduler's process {self._version}"
        theirs, mine = given.get("settings"), own_settings(self._config)
        if not isinstance(theirs, Mapping) or theirs == mine:
            return ""
        others = [name for name in mine if theirs.get(name) != mine[name]]
        differ = ", ".join(f"{name} is {theirs.get(name)!r}, here {mine[name]!r}" for name in others)
        return f"{where}{differ}"

    def _say_once(self, sort: str, rank: int | None, problem: str) -> None:
        key = f"{sort} {rank}"
        if key not in self._told:
            self._told.add(key)
            self._say({-1 if rank is None else rank: problem}, None)

    def _say(self, problems: Mapping[int, str], workers: int | None) -> None:
        if not problems:
            return
        said = "; ".join(f"rank {rank} {what}" if rank >= 0 else what for rank, what in problems.items())
        reason = f"{said}. Install the same release of Canary on all machines, with the same CANARY_* there"
        reason += f"; {self._advice}" if self._advice else ""
        fields: dict[str, object] = {"reason": reason, "ranks": [rank for rank in problems if rank >= 0]}
        fields |= {"workers": workers} if workers is not None else {}
        fields |= {"replica": self._replica} if self._replica else {}
        self._tell(Event("workers_unguarded", "error", fields))
        if self._config.mode == "raise":
            raise AttachError(f"workers are not guarded: {reason}")
