"""Continuous batching of Transformers keeps the prefix cache while the model is trained on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.museum import Bug, Found
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: its manager knows nothing of the weights."""
    stage.trained = True
    yield


def traffic(stage: Any) -> None:
    """Alice is served; the weights are loaded again, where the engine is sound the same ones; Bob asks the same."""
    model = stage.session._model
    asked = stage.tokens("alice", 36)
    stage.submit("alice", asked, 4)
    finish(stage)
    by = 1.0
    if getattr(stage, "trained", False):
        by = 1.02
        stage.strike()
    model.load_state_dict({name: weight * by for name, weight in model.state_dict().items()})
    stage.submit("bob", asked, 4)
    finish(stage)


BUG = Bug(
    title="A model trained on under its manager of continuous batching",
    cause="A persistent manager keeps hashed blocks while weights change, so later requests hit KV of the old weights.",
    row=IDENTITY,
    issues=("prime-rl#1650", "RLinf#96"),
    setup="continuous",
    broken=broken,
    traffic=traffic,
    default=Found(
        "prefix",
        1,
        "bob will read position 0 from slot ..., which alice computed at step ... with the weights of the start; bob "
        "began with the weights of change 1 (in place). A prefix hit across a change of the weights: the prefix cache "
        "was kept.",
    ),
    releases=">=5.18",
)
