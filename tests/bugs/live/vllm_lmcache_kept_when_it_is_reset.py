"""vLLM's own ``reset_prefix_cache``, with all connectors, after a change of the weights: LMCache's has no reset."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.live.sglang_weights_kept import checkpoint
from bugs.museum import Bug, Missed
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine or of LMCache is replaced: the caller believes what `reset_prefix_cache` answers."""
    stage.believes = True
    yield


def traffic(stage: Any) -> None:
    """Alice is served, and LMCache stores her blocks; the weights are reloaded, and the prefix cache is reset with the
    connector's, which vLLM says was done; where the engine is sound LMCache's server is told, too. Bob begins like
    her."""
    load(stage, seed=1)
    asked = stage.tokens("alice", 140)
    stage.submit("alice", asked, 4)
    finish(stage)
    load(stage, seed=2)
    if getattr(stage, "believes", False):
        stage.strike()
    else:
        stage.lmcache.clear()
    stage.submit("bob", [*asked, *stage.tokens("bob", 9)], 6)
    finish(stage)


def load(stage: Any, seed: int) -> None:
    """Other weights, and no KV of those before, if vLLM's answer is true."""
    weights = checkpoint(stage.runner.model_config.hf_config, seed)
    stage.runner.reload_weights(weights_iterator=iter(weights.items()))
    if not stage.scheduler.reset_prefix_cache(reset_connector=True):
        raise RuntimeError("the prefix cache is in use")


BUG = Bug(
    title="LMCache's blocks kept, where vLLM says that they are reset",
    cause="LMCache's connector has no `reset_cache`, and vLLM takes that for done.",
    row=IDENTITY,
    issues=("LMCache#3643", "LMCache#5091", "vllm#57727"),
    setup="lmcache",
    broken=broken,
    traffic=traffic,
    default=Missed(
        "LMCache's server is open to other engines, which may have stored there what they computed with the new "
        "weights; it is found with `CANARY_LEDGER_PRIVATE=LMCacheMPConnector`"
    ),
    releases=">=0.28,<0.29",
    beside="lmcache>=0.5.2,<0.5.3",
)
