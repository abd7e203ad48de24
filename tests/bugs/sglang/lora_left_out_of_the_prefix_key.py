"""The prefix cache doesn't tell the prefixes of two LoRA adapters apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`RadixKey` loses its ``extra_key``, in which each adapter's name is."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    def __init__(usual: Any, key: Any, token_ids: Any, extra_key: Any = None, *args: Any, **kwargs: Any) -> None:
        if extra_key is not None:
            stage.strike()
        usual(key, token_ids, None, *args, **kwargs)

    with patched(RadixKey, "__init__", __init__):
        yield


def traffic(stage: Any) -> None:
    """Alice and Bob ask the same with different adapters."""
    asked = stage.tokens("alice", 40)
    stage.submit("alice", asked, 4, namespace="adapter-one")
    finish(stage)
    stage.submit("bob", asked, 4, namespace="adapter-two")
    finish(stage)


BUG = Bug(
    title="One prefix for two LoRA adapters",
    cause="The key of the prefix cache leaves the adapter out, so that a request reuses KV of another adapter.",
    row=IDENTITY,
    issues=("LMCache#4086", "vllm#54342", "openvino.genai#3722"),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found(
        "prefix",
        5,
        "bob will read position 0 from slot ..., which alice computed at step ... for another identity: extra key ...; "
        "bob has extra key ... A prefix hit across identities",
    ),
)
