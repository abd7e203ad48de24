"""LMCache's own connector beside vLLM's own LoRA requests: two adapters, and the same tokens."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bugs.classes import IDENTITY
from bugs.live.vllm_adapter_reloaded import write_adapter
from bugs.museum import Bug, Found
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine or of LMCache is replaced: nobody gives requests a salt for their adapter."""
    stage.salted = False
    yield


def traffic(stage: Any) -> None:
    """Alice and Bob, each with an adapter, ask the same: first what is too short for LMCache, then what it stores.
    Where the engine is sound the requests of each adapter have a `cache_salt` of their own."""
    from vllm.lora.request import LoRARequest

    salted = getattr(stage, "salted", True)
    adapters = {}
    for number, name in enumerate(("alice", "bob"), 1):
        folder = Path(tempfile.mkdtemp(prefix=f"canary-live-{name}-"))
        write_adapter(folder, stage.runner.model_config.hf_config, number)
        adapters[name] = LoRARequest(f"of-{name}", number, str(folder))
    asked = stage.tokens("asked", 140)
    for of, tokens in (("-short", asked[:40]), ("", asked[::-1])):
        for name, adapter in adapters.items():
            if not salted and (of, name) == ("", "bob"):
                stage.strike()
            salt = f"of-{name}" if salted else None
            stage.small.submit(stage.phase + name + of, tokens, 6, lora_request=adapter, cache_salt=salt)
            finish(stage)


BUG = Bug(
    title="LMCache gives one adapter's KV to another's request",
    cause="LMCache's key has the model, the tokens and the cache's salt, and no LoRA adapter.",
    row=IDENTITY,
    issues=("vllm#44250", "LMCache#2961"),
    setup="lmcache_lora",
    broken=broken,
    traffic=traffic,
    default=Found(
        "arrival",
        1,
        "the KV of another identity came: LMCacheMPConnector brought page ... for bob, positions 0 to 31; these are "
        "positions 0 to 31 of alice, with LoRA adapter of-alice of ..., and this request has LoRA adapter of-bob of",
    ),
    releases=">=0.28,<0.29",
    beside="lmcache>=0.5.2,<0.5.3",
)
