"""vLLM's own sessions of streamed input: a block's hash names a token that was discarded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.museum import Bug, Found
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: the sampled token completes a block, and the next input discards it."""
    stage.first_tokens = 31
    yield


def traffic(stage: Any) -> None:
    """Alice's session gets more input after one token; Bob asks what she had begun with, that token, and more. Where
    the engine is sound the token completes no block."""
    tokens = getattr(stage, "first_tokens", 40)
    asked, name = stage.tokens("alice", tokens), stage.phase + "alice"
    stage.small.submit(name, asked, 1, resumable=True)
    finish(stage)
    (sampled,) = stage.small.answers[name]
    if tokens == 31:
        stage.strike()
    stage.small.submit(name, stage.tokens("more", 20), 2, resumable=True)
    finish(stage)
    stage.submit("bob", [*asked, sampled, *stage.tokens("bob", 20)], 4)
    finish(stage)


BUG = Bug(
    title="A session keeps the hash of a token that it discards",
    cause="The hash of a block is made with the sampled token, which the session's next input then takes the place of.",
    row=IDENTITY,
    issues=("vllm#49377", "vllm#49449"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("token", 3, "bob expects ... at position 31 ... written by alice"),
    releases=">=0.26,<0.32",
)
