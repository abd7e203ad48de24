"""vLLM's own ``reset_prefix_cache`` after a change of the weights, beside a connector that keeps what it has stored."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.live.sglang_weights_kept import checkpoint
from bugs.museum import Bug, Missed
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: the cache is reset, as its API does by default, and the connector is not."""
    stage.kept = True
    yield


def traffic(stage: Any) -> None:
    """Alice is served, and the connector stores her blocks; the weights are reloaded, and the prefix cache is reset,
    where the engine is sound the connector's, too; Bob begins like her."""
    kept = getattr(stage, "kept", False)
    asked = stage.tokens("alice", 70)
    stage.submit("alice", asked, 4)
    finish(stage)
    weights = checkpoint(stage.runner.model_config.hf_config, seed=1 + kept)
    stage.runner.reload_weights(weights_iterator=iter(weights.items()))
    if kept:
        stage.strike()
    if not stage.scheduler.reset_prefix_cache(reset_connector=not kept):
        raise RuntimeError("the prefix cache is in use")
    stage.submit("bob", [*asked, *stage.tokens("bob", 9)], 4)
    finish(stage)


BUG = Bug(
    title="Weights reloaded and the prefix cache reset, and the connector's blocks kept",
    cause="`reset_prefix_cache` leaves what connectors have stored, so KV of the old weights comes back.",
    row=IDENTITY,
    issues=("vllm#57727",),
    setup="connector",
    broken=broken,
    traffic=traffic,
    default=Missed(
        "nobody has told Canary that only this engine stores there, so the KV may be another engine's of the "
        "new weights; it is found with `CANARY_LEDGER_PRIVATE`"
    ),
)
