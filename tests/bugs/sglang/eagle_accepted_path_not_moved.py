"""The accepted path of a draft tree stays where it was computed, and rejected drafts lie in its place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import DRAFT
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`move_accept_tokens_to_target_kvcache` does nothing."""
    from sglang.srt.speculative import eagle_worker_common

    def move(usual: Any, batch: Any, accept_index: Any, *args: Any) -> None:
        if bool((accept_index[:, 1:] > 0).any()):
            stage.strike()

    with patched(eagle_worker_common, "move_accept_tokens_to_target_kvcache", move):
        yield


BUG = Bug(
    title="EAGLE's accepted tokens are not moved",
    cause="The KV of rejected drafts stays in the slots in which the accepted tokens should be.",
    row=DRAFT,
    issues=("mlx-vlm#1155", "transformers#48280"),
    setup="eagle_tree",
    broken=broken,
    traffic=together,
    default=Found(
        "bytes", 1, "the bytes that were copied or loaded to slot ... of k. ... are not those that alice wrote"
    ),
)
