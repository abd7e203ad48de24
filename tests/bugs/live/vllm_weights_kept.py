"""vLLM's own ``reload_weights``, without `reset_prefix_cache`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.live.sglang_weights_kept import checkpoint
from bugs.museum import Bug, Found
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: nobody resets the prefix cache, as its API allows."""
    stage.kept = True
    yield


def traffic(stage: Any) -> None:
    """Alice is served; the weights are reloaded, as a trainer does; Bob asks the same."""
    kept = getattr(stage, "kept", False)
    asked = stage.tokens("alice", 70)
    stage.submit("alice", asked, 4)
    finish(stage)
    weights = checkpoint(stage.runner.model_config.hf_config, seed=1 + kept)
    stage.runner.reload_weights(weights_iterator=iter(weights.items()))
    if kept:
        stage.strike()
    elif not stage.scheduler.reset_prefix_cache():
        raise RuntimeError("the prefix cache is in use")
    stage.submit("bob", asked, 4)
    finish(stage)


BUG = Bug(
    title="Weights reloaded, and the prefix cache kept",
    cause="`reload_weights` leaves the prefix cache to its caller, so later requests hit KV of the old weights.",
    row=IDENTITY,
    issues=("prime-rl#1650", "RLinf#96"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found(
        "prefix",
        1,
        "bob will read position 0 from slot ..., which alice computed at step ... with the weights of change 1 "
        "(reload_weights); bob began with the weights of change 2 (reload_weights). A prefix hit across a change of "
        "the weights: the prefix cache was kept.",
    ),
)
