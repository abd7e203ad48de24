"""An engine for a demonstration (`DemoEngine`), its task (`Job`), and the result (`Served`)."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from canary_core.config import CanaryConfig

TOKENS = 256
"""Prompts are made of smaller token ids."""
PROMPT_TOKENS = 192
NEW_TOKENS = 16
"""Most tokens of a prompt, and of an answer."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests: prompts of token ids 1 to `TOKENS` - 1, many with a common beginning, and the number of tokens to
    answer each with."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]

    @classmethod
    def of(cls, requests: int, seed: int) -> "Traffic":
        """Seeded: two thirds of the prompts share one of four beginnings, some are repeated whole, and every sixth is
        long, so that an engine has to read it in several forwards."""
        draw = random.Random(f"traffic {seed}")
        begins = [_tokens(draw, draw.randrange(20, 64)) for _ in range(4)]
        prompts: list[tuple[int, ...]] = []
        for i in range(requests):
            own = _tokens(draw, draw.randrange(96, 128) if i % 6 == 5 else draw.randrange(1, 32))
            begin = draw.choice(begins) if draw.random() < 0.67 else ()
            repeats = prompts and draw.random() < 0.1
            prompts.append(draw.choice(prompts) if repeats else (*begin, *own))
        return cls(tuple(prompts), tuple(draw.randrange(4, NEW_TOKENS + 1) for _ in prompts))

    def first(self, requests: int) -> "Traffic":
        """The first ``requests`` requests."""
        return Traffic(self.prompts[:requests], self.new_tokens[:requests])


@dataclass(frozen=True, slots=True)
class Job:
    """One serving run: ``traffic`` on ``model`` (weights from ``seed``) under ``config``, not guarded in mode off.

    ``plugins`` get the hooks of every Canary of the run. ``finished`` is called once for each answered request.
    """

    model: str
    seed: int
    traffic: Traffic
    config: CanaryConfig
    plugins: tuple[object, ...] = ()
    finished: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Served:
    """Result: for each request a value that is equal only for bit-identical answers; `Canary.stats` (empty where not
    guarded); the time from the first forward to the last answer, without building and attaching."""

    outputs: tuple[object, ...]
    stats: Mapping[str, int]
    seconds: float


class DemoEngine(Protocol):
    """An engine for a demonstration. Runs must be repeatable: the same job schedules the same batches."""

    @property
    def name(self) -> str:
        """The plugin's name."""

    @property
    def models(self) -> Sequence[str]:
        """The first one has full attention, another one a sliding window if the engine can."""

    def serve(self, job: Job) -> Served:
        """Serves all requests with a fresh cache, and returns after all findings have been reported."""


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(1, TOKENS) for _ in range(count))
