"""The hash of a block has nothing of the LoRA adapter."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bugs.classes import IDENTITY
from bugs.live.vllm_adapter_reloaded import request, submit, write_adapter
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`_gen_lora_extra_hash_keys` gives nothing."""
    from vllm.v1.core import kv_cache_utils

    def keys(usual: Any, of: Any) -> list[Any]:
        if usual(of):
            stage.strike()
        return []

    with patched(kv_cache_utils, "_gen_lora_extra_hash_keys", keys):
        yield


def traffic(stage: Any) -> None:
    """Alice is served with an adapter; Bob asks the same without one."""
    folder = Path(tempfile.mkdtemp(prefix="canary-museum-"))
    write_adapter(folder, stage.runner.model_config.hf_config, 1)
    asked = stage.tokens("alice", 70)
    submit(stage, "alice", asked, request(folder, load_inplace=False))
    finish(stage)
    stage.submit("bob", asked, 4)
    finish(stage)


BUG = Bug(
    title="A block's hash leaves the adapter out",
    cause="The same tokens have one hash with a LoRA adapter and without.",
    row=IDENTITY,
    issues=("vllm#30931", "LMCache#4783"),
    setup="lora",
    broken=broken,
    traffic=traffic,
    default=Found("prefix", 6, "bob will read position 0 from slot ..., which alice computed ... LoRA adapter sql"),
)
