"""What a round of traffic asks of an engine: the same for a seed, a setup and a number."""

import random
from dataclasses import dataclass

ROUNDS_OF_ONE_PREFIX = 6
"""So many rounds share their prefixes, so that later ones hit what earlier ones have cached."""


@dataclass(frozen=True)
class Shape:
    """How large a round is. ``prompt``, ``new``: most tokens of a prompt and of an answer. ``requests``: of a round,
    ``burst``: most of them that come at once, ``gap``: most turns of the engine until the next ones.
    ``aborts``, ``flushes``: shares of requests and of rounds. ``salted``: share of requests that have a namespace of
    the prefix cache to themselves (a cache salt, an extra key), where the engine has such. ``vocabulary``: tokens are
    below it."""

    prompt: int = 100
    new: int = 24
    requests: int = 10
    burst: int = 4
    gap: int = 8
    aborts: float = 0.1
    flushes: float = 0.2
    salted: float = 0.2
    vocabulary: int = 250


@dataclass(frozen=True)
class Asked:
    """A request. ``turn``: of the round, in which it comes. ``aborted``: how many turns later a client gives it up;
    None for one that is served to its end. ``salt``: the namespace that it shares with others; empty for the common
    one."""

    name: str
    turn: int
    tokens: tuple[int, ...]
    new: int
    aborted: int | None
    salt: str = ""


@dataclass(frozen=True)
class Plan:
    """A round. ``flush``: the prefix cache is emptied before it."""

    number: int
    asked: tuple[Asked, ...]
    flush: bool


def plan(shape: Shape, seed: int, setup: str, number: int) -> Plan:
    """The round of that number: requests of all lengths, most of which begin with one of a few prefixes; one in three
    rounds asks the prompts of the one before it again."""
    draw = random.Random(f"soak {seed} {setup} {number}")
    prefixes = _prefixes(shape, seed, setup, number)
    prompts = _prompts(shape, seed, setup, number, prefixes)
    turn, asked = 0, []
    while len(asked) < len(prompts):
        for _ in range(min(draw.randrange(1, shape.burst + 1), len(prompts) - len(asked))):
            new = draw.choice((draw.randrange(1, shape.new + 1), shape.new))
            aborted = draw.randrange(new + 4) if draw.random() < shape.aborts else None
            name = f"{number}-{len(asked)}"
            salt = draw.choice(("salt-a", "salt-b")) if draw.random() < shape.salted else ""
            asked.append(Asked(name, turn, prompts[len(asked)], new, aborted, salt))
        turn += draw.randrange(1, shape.gap + 1)
    return Plan(number, tuple(asked), draw.random() < shape.flushes)


def _prefixes(shape: Shape, seed: int, setup: str, number: int) -> list[list[int]]:
    draw = random.Random(f"soak prefixes {seed} {setup} {number // ROUNDS_OF_ONE_PREFIX}")
    return [[_token(shape, draw) for _ in range(shape.prompt * 3 // 4)] for _ in range(3)]


def _prompts(shape: Shape, seed: int, setup: str, number: int, prefixes: list[list[int]]) -> list[tuple[int, ...]]:
    if number % 3 == 2:
        return _prompts(shape, seed, setup, number - 1, prefixes)
    draw = random.Random(f"soak prompts {seed} {setup} {number}")
    prompts = []
    for _ in range(shape.requests):
        prefix = draw.choice(prefixes)
        head = prefix[: draw.randrange(len(prefix) + 1)] if draw.random() < 0.7 else []
        tail = draw.randrange(1, max(2, (shape.prompt - len(head)) // draw.choice((1, 1, 4)) + 1))
        prompts.append((*head, *(_token(shape, draw) for _ in range(tail))))
    return prompts


def _token(shape: Shape, draw: random.Random) -> int:
    return draw.randrange(3, shape.vocabulary)
