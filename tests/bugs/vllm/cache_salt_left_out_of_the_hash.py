"""The salt that keeps two tenants' prefixes apart is not in the hash."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`generate_block_hash_extra_keys` gives none: no salt, no LoRA adapter, no image."""
    from vllm.v1.core import kv_cache_utils

    def generate_block_hash_extra_keys(usual: Any, request: Any, start: int, end: int, image: int) -> Any:
        keys, image = usual(request, start, end, image)
        if keys:
            stage.strike()
        return None, image

    with patched(kv_cache_utils, "generate_block_hash_extra_keys", generate_block_hash_extra_keys):
        yield


def traffic(stage: Any) -> None:
    """Two tenants ask the same."""
    asked = stage.tokens("alice", 70)
    stage.submit("alice", asked, 2, salt="one")
    finish(stage)
    stage.submit("bob", asked, 4, salt="two")
    finish(stage)


BUG = Bug(
    title="Two tenants share a prefix",
    cause="The block's hash leaves out the cache salt, the LoRA adapter and the image, so that KV crosses identities.",
    row=IDENTITY,
    issues=("LMCache#4086", "vllm#54342", "openvino.genai#3722"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found(
        "prefix", 6, "bob will read position 0 from slot ... which alice co... A prefix hit across identities"
    ),
)
