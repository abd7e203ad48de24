"""Of the rejected drafts, one stays in the cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import DRAFT
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`Cache.crop` takes back one token fewer than were rejected."""
    from transformers.cache_utils import Cache

    def crop(usual: Any, cache: Any, tokens: int) -> None:
        if tokens < 0:
            stage.strike()
            tokens += 1
        usual(cache, tokens)

    with patched(Cache, "crop", crop):
        yield


def traffic(stage: Any) -> None:
    """Prompt lookup proposes tokens, most of which are rejected."""
    from tiny.generation import LOOP, generate

    generate(stage.model, LOOP, prompt_lookup_num_tokens=3)


BUG = Bug(
    title="A rejected draft stays in the cache",
    cause="The roll-back after a rejection is one token short.",
    row=DRAFT,
    issues=("mlx-vlm#1155", "transformers#48280"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found(
        "unwritten", 1, "generate ... will read position ... which holds nothing since it was cleared or rolled back"
    ),
)
