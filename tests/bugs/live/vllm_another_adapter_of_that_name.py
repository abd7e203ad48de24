"""vLLM's own LoRA requests: another adapter under a name that was used before."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bugs.classes import IDENTITY
from bugs.live.vllm_adapter_reloaded import submit, write_adapter
from bugs.museum import Bug, Found
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: Bob's adapter has the name of Alice's."""
    stage.same_name = True
    yield


def traffic(stage: Any) -> None:
    """Alice is served with an adapter; Bob asks the same of another one, with another number and other files."""
    from vllm.lora.request import LoRARequest

    asked = stage.tokens("alice", 70)
    same = getattr(stage, "same_name", False)
    for number, name in enumerate(("alice", "bob"), 1):
        folder = Path(tempfile.mkdtemp(prefix=f"canary-live-{name}-"))
        write_adapter(folder, stage.runner.model_config.hf_config, number)
        if same and name == "bob":
            stage.strike()
        number += 2 * same
        submit(stage, name, asked, LoRARequest("sql" if same else f"of-{name}", number, str(folder)))
        finish(stage)


BUG = Bug(
    title="Another adapter under the same name",
    cause="Hashes of blocks have the adapter's name, neither its number nor its files.",
    row=IDENTITY,
    issues=("vllm#30931",),
    setup="lora",
    broken=broken,
    traffic=traffic,
    default=Found("prefix", 1, "bob will read position 0 from slot ..., which alice computed"),
    releases=">=0.26,<0.31",
)
