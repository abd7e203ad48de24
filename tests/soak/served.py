"""`Served`: an engine that runs under guard in this process, as the soak drives it; `Round`: what it is asked for."""

import random
import time
from abc import ABC, abstractmethod
from collections import Counter

from canary_core import Canary, Violation, hook_manager, hookimpl
from canary_core.testing import Findings
from soak.plan import Asked, Plan

PATIENCE_S = 400
"""A round that takes longer does not end, on the slowest of engines."""

OUR_OWN = frozenset({"paused", "resumed", "coverage", "unjudged", "recompute_starved"})
"""Warnings that say what the soak itself did, and what it shows by itself, as ``recompute_unjudged``."""

FINDINGS = frozenset({"violation", "incident", "diagnosis", "incidents_limited"})
"""Events that say once more what is in the findings."""


class Late(Exception):
    """The time is over in the middle of a round; the engine has been emptied."""


class Witness(Findings):
    """Hears everything that Canaries of this process tell, and of each Canary that is built."""

    def __init__(self) -> None:
        super().__init__()
        self.canaries: list[Canary] = []

    @hookimpl
    def canary_attached(self, canary: Canary) -> None:
        """Keeps it."""
        self.canaries.append(canary)

    def trouble(self) -> list[str]:
        """What was told beside findings that is no good news."""
        return [
            f"{event.name} {event.fields}"
            for event in self.events
            if event.level in ("warning", "error") and event.name not in OUR_OWN | FINDINGS
        ]


class Served(ABC):
    """An engine with its guard, which came in as it does for users, by ``CANARY_PLUGINS``. Make the object before the
    engine. ``witness``: all that Canary tells. ``counts``: what the traffic did, by a name that the table shows."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.witness = Witness()
        hook_manager().register(self.witness)

    @property
    @abstractmethod
    def version(self) -> str:
        """Of the engine."""

    @abstractmethod
    def serve(
        self, plan: Plan, until: float, name: str = "", flip: random.Random | None = None
    ) -> dict[str, list[int]]:
        """A round: answers by name, without those of requests that were given up. ``name`` makes the names of a second
        serving others. Raises `Late` once ``until`` (seconds of the epoch) is over. ``flip``: a bit of a running
        request's KV is flipped in its course, by the engine's own tables."""

    @abstractmethod
    def flush(self) -> bool:
        """Empties the prefix cache of the idle engine; False if the engine would not."""

    def stats(self) -> dict[str, int]:
        """Counters of all Canaries together. ``forwards``: of the model that is served, which attaches first."""
        total: Counter[str] = Counter()
        for number, canary in enumerate(self.witness.canaries):
            stats = dict(canary.stats())
            if number:
                stats["draft_forwards"] = stats.pop("forwards", 0)
            total.update(stats)
        return dict(total)

    def violations(self) -> list[Violation]:
        """What was found so far, after the device was waited for."""
        for canary in self.witness.canaries:
            canary.drain()
        return self.witness.violations

    def pause(self) -> None:
        """From now on forwards run unguarded."""
        for canary in self.witness.canaries:
            canary.step.pause()

    def resume(self) -> None:
        """Undoes `pause`."""
        for canary in self.witness.canaries:
            canary.step.resume()


class Stepwise(Served):
    """An engine that is driven turn by turn."""

    @abstractmethod
    def submit(self, name: str, asked: Asked) -> None:
        """Queues a request of that name, to be answered greedily."""

    @abstractmethod
    def abort(self, name: str) -> None:
        """Gives a request up, as a client does."""

    @abstractmethod
    def turn(self) -> bool:
        """One turn of the engine; False if it has nothing to do."""

    @abstractmethod
    def ended(self) -> dict[str, list[int]]:
        """Answers of requests that ended since the last call."""

    @abstractmethod
    def flip(self, draw: random.Random) -> bool:
        """Flips a bit of KV that a running request is about to read; False if there is none now."""

    def serve(
        self, plan: Plan, until: float, name: str = "", flip: random.Random | None = None
    ) -> dict[str, list[int]]:
        """As `Served.serve` says."""
        going = Round(self, plan, until, name)
        going.flip = flip
        while going.on:
            going.before_turn()
            going.after_turn(self.turn())
        return going.finish()

    def settle(self) -> None:
        """Turns until there is nothing left to do."""
        for _ in range(1000):
            if not self.turn():
                break
        self.ended()


class Round:
    """A plan while it is served. ``flip``: where the bit lies that is to be flipped, None for none."""

    def __init__(self, engine: Stepwise, plan: Plan, until: float, name: str) -> None:
        self._engine = engine
        self._plan = plan
        self._until = until
        self._patience = time.time() + PATIENCE_S
        self._name = name
        self._coming = list(plan.asked)
        self._aborts: list[tuple[int, str]] = []
        self._waiting: set[str] = set()
        self._answers: dict[str, list[int]] = {}
        self._turn = 0
        self.late = False
        self.flip: random.Random | None = None

    @property
    def on(self) -> bool:
        """Whether somebody still waits or is still to come."""
        return not self.late and bool(self._coming or self._waiting)

    def before_turn(self) -> None:
        """Requests come, and are given up."""
        engine = self._engine
        while self._coming and self._coming[0].turn <= self._turn:
            asked = self._coming.pop(0)
            name = asked.name + self._name
            engine.submit(name, asked)
            self._waiting.add(name)
            if asked.aborted is not None:
                self._aborts.append((self._turn + asked.aborted, name))
        for due in [due for due in self._aborts if due[0] <= self._turn]:
            self._aborts.remove(due)
            if due[1] in self._waiting:
                engine.abort(due[1])
                self._waiting.remove(due[1])
                engine.counts["aborted"] += 1
        if self.flip is not None and engine.flip(self.flip):
            self.flip = None

    def after_turn(self, busy: bool) -> None:
        """Takes answers. ``busy``: whether the engine had something to do."""
        for name, tokens in self._engine.ended().items():
            if name in self._waiting:
                self._waiting.remove(name)
                self._answers[name.removesuffix(self._name)] = tokens
        # Where nobody is there, the next ones come now.
        self._turn = self._turn + 1 if busy or not self._coming else max(self._turn + 1, self._coming[0].turn)
        now = time.time()
        self.late = self.late or (self.on and now > self._until)
        if now > self._patience:
            raise RuntimeError(f"round {self._plan.number} does not end, {sorted(self._waiting)} still run")

    def give_up(self) -> None:
        """Who still waits waits no longer; nobody comes any more."""
        for name in self._waiting:
            self._engine.abort(name)
        self._waiting.clear()

    def finish(self) -> dict[str, list[int]]:
        """Empties the engine, and gives the answers. Raises `Late` if not all is answered."""
        self.give_up()
        self._engine.settle()
        if self.late:
            raise Late
        return self._answers
