"""Requests served by the suite."""

import random
from collections.abc import Iterator

from canary_kit.conformance.stage import Ask


def prompt(tokens: int, vocabulary: int, seed: object) -> tuple[int, ...]:
    """So many token ids from 1 to ``vocabulary - 1``."""
    draw = random.Random(f"conformance {seed}")
    return tuple(draw.randrange(1, vocabulary) for _ in range(tokens))


def apart(count: int, longest: int, vocabulary: int, new_tokens: int = 6) -> tuple[Ask, ...]:
    """``count`` prompts of odd lengths, no two with the same beginning."""
    return tuple(
        Ask(name, (vocabulary - count + i, *prompt(length - 1, vocabulary - count, name)), new_tokens)
        for i, (name, length) in enumerate(zip(_names(count), _lengths(count, longest), strict=True))
    )


def alike(count: int, longest: int, vocabulary: int, new_tokens: int = 6) -> tuple[Ask, ...]:
    """``count`` prompts that share beginnings of several lengths; every fourth one repeats the first as a whole."""
    begin = prompt(longest, vocabulary, "alike")
    draw = random.Random("alike")
    asks = []
    for i, name in enumerate(_names(count)):
        shared = begin[: draw.randrange(longest // 2, longest - 4)]
        own = prompt(draw.randrange(1, 5), vocabulary, name)
        asks.append(Ask(name, begin if i % 4 == 0 else shared + own, new_tokens))
    return tuple(asks)


def _names(count: int) -> Iterator[str]:
    return (f"request-{i:03d}" for i in range(count))


def _lengths(count: int, longest: int) -> Iterator[int]:
    """1, 2, 3, then powers of two and their neighbours, then random ones."""
    edges = [1, 2, 3, *(n + d for n in (4, 8, 16, 32, 64, 128) for d in (-1, 0, 1))]
    fit = sorted({n for n in edges if n <= longest} | {longest})
    draw = random.Random("lengths")
    draw.shuffle(fit)
    return (fit[i] if i < len(fit) else draw.randrange(1, longest + 1) for i in range(count))
