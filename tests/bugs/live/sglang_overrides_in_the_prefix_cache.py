"""SGLang's own ``positional_embed_overrides``: embeddings in the place of placeholder tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.museum import Bug, Found
from bugs.traffic import finish

AT = range(8, 12)
"""Positions of the placeholders."""


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: it is given embeddings, as its API allows."""
    stage.given = True
    yield


def traffic(stage: Any) -> None:
    """Alice is served with embeddings at four positions, where the engine is sound without any; Bob asks the same in
    plain tokens."""
    asked = stage.tokens("alice", 40)
    given = getattr(stage, "given", False)
    if given:
        submit(stage, "alice", asked)
    else:
        stage.submit("alice", asked, 4)
    finish(stage)
    if given:
        # What Alice left is inserted by now.
        stage.strike()
    stage.submit("bob", asked, 4)
    finish(stage)


def submit(stage: Any, name: str, tokens: list[int]) -> None:
    """Queues a request with embeddings in the place of its tokens at `AT`."""
    import torch
    from sglang.srt.managers.embed_types import PositionalEmbeds

    hidden = stage.runner.model_config.hf_config.hidden_size
    rows = torch.randn(len(AT), hidden, generator=torch.Generator().manual_seed(7))
    overrides = PositionalEmbeds(embeds=rows, positions=list(AT))
    stage.requests[name] = stage.driver.submit(tokens, 4, stage.phase + name, positional_embed_overrides=overrides)


BUG = Bug(
    title="KV of overriding embeddings inserted under the placeholders",
    cause="A request with overrides matches nothing, but is inserted into the radix cache under its tokens alone.",
    row=IDENTITY,
    issues=(),
    releases="<0.5.22",
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found(
        "prefix",
        1,
        "bob has at positions 8 to 11 tokens, but will read position 8 from slot ..., which alice computed at step "
        "... of embeddings #... A prefix hit across contents: the key of the prefix cache lacks what tells them apart.",
    ),
)
