"""Wrong brackets around a forward, and wrong installations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from canary_toy import hooks
from canary_toy.batch import ToyBatch
from canary_toy.hooks import ToyGuard
from canary_toy.toy_engine import KVPool
from conformance.mutations.changes import (
    Break,
    bracket,
    changes_output,
    first_engine_only,
    forward_twice,
    guarded,
    install,
    installs_again,
    never_closes,
    never_restores,
    only_first_forward,
    settings_ignored,
    swallows,
)

from canary_core.guard.sampling import SampledTokens
from canary_core.guard.step import Step
from canary_core.patches import Patches
from canary_core.runtime.writers import Writers
from canary_core.watchers.tables import TableCheck


def stored(told: Any) -> Break:
    """What is told of a layer's store: ``told(step, layer)``."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = Step.stored
        patch.setattr(Step, "stored", lambda self, layer, *more: told(lambda *given: right(self, *given), layer))

    return apply


def stored_early(patch: pytest.MonkeyPatch) -> None:
    """The store is told before it was issued."""
    right = ToyGuard.__init__

    def init(self: ToyGuard, engine: Any, config: Any) -> None:
        right(self, engine, config)
        if self.canary.step.stores.on:
            store = KVPool.store

            def early(layer: int, *new: Any) -> None:
                self.canary.step.stored(layer)
                store(engine.pool, layer, *new)

            engine.pool.store = early

    patch.setattr(ToyGuard, "__init__", init)


def stored_late(patch: pytest.MonkeyPatch) -> None:
    """All stores are told when the forward ends."""
    right = Step.stored
    waiting: list[int] = []
    patch.setattr(Step, "stored", lambda self, layer, *more: waiting.append(layer))
    made = ToyGuard._guarded

    def guarded_late(self: ToyGuard, forward: Any) -> Any:
        def late(batch: Any) -> Any:
            output = forward(batch)
            while waiting:
                right(self.canary.step, waiting.pop(0))
            return output

        return made(self, late)

    patch.setattr(ToyGuard, "_guarded", guarded_late)


def sampler(change: Any) -> Break:
    """The sampler's tokens, as they are told."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyBatch.sampled
        patch.setattr(ToyBatch, "sampled", lambda self, batch, tokens: change(right(self, batch, tokens), batch))

    return apply


def named(change: Any) -> Break:
    """The conditions of a request, as they are told."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = Writers.identify
        patch.setattr(
            Writers, "identify", lambda self, request, **given: right(self, request, **change(request, **given))
        )

    return apply


def attribute(owner: type, name: str, value: Any) -> Break:
    """An attribute of a class, replaced."""

    return lambda patch: patch.setattr(owner, name, value)


def unfollowed(name: str) -> Break:
    """The function of the engine is not hooked."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        follow = Patches.follow

        def left_out(self: Patches, owner: Any, function: str, told: Callable[..., None]) -> None:
            if function != name:
                follow(self, owner, function, told)

        patch.setattr(Patches, "follow", left_out)

    return apply


HOOKS: dict[str, Break] = {
    "a change of the weights is not told": unfollowed("update_weights"),
    "the view is made when the forward has run": guarded(
        lambda session, forward: (
            lambda batch: (
                forward(batch),
                session.canary.step.run(lambda: None, lambda: session._batch.view(batch)),
            )[0]
        )
    ),
    "the check comes after the forward": bracket(before=True, check="last", after=True, end=True),
    "the record comes before the forward": bracket(before=True, check="both", after=True, end=True),
    "there is no step.after": bracket(before=True, check="first", after=False, end=True),
    "there is no step.before": bracket(before=False, check="first", after=True, end=True),
    "there is no step.end": bracket(before=True, check="first", after=True, end=False),
    "only the first forward is guarded": guarded(only_first_forward),
    "the forward runs twice": guarded(forward_twice),
    "the output is changed": guarded(changes_output),
    "findings are swallowed in raise mode": guarded(swallows),
    "canary_install does nothing": install(lambda self, config: None),
    "canary_install twice hooks twice": installs_again,
    "canary_uninstall leaves the hooks": never_restores,
    "canary_uninstall closes no Canary": never_closes,
    "only the first engine is guarded": first_engine_only,
    "the settings are not handed on": settings_ignored,
    "names are never forgotten": attribute(Writers, "forget", lambda self, request: None),
    "identities are not told": attribute(Writers, "identify", lambda self, request, **given: None),
    "embeddings are not told": lambda patch: patch.setattr(hooks, "put_embeddings", lambda *given: None),
    "all identities are told as one": named(lambda request, **given: {"cache_salt": "salt"}),
    "each request is told as an identity of its own": named(lambda request, **given: {"cache_salt": request}),
    "the sampler is not followed": attribute(SampledTokens, "follow", lambda self: False),
    "the sampler's tokens are not given": attribute(SampledTokens, "give", lambda self, *given: None),
    "the sampler's tokens are given as unknown": sampler(lambda tokens, batch: torch.full_like(tokens, -1)),
    "the sampler's tokens are in reverse order": sampler(lambda tokens, batch: tokens.flip(0).contiguous()),
    "the sampler's tokens are the forward's input": sampler(
        lambda tokens, batch: batch.token_ids[batch.new_lens.cumsum(0)[: len(tokens)] - 1].clone()
    ),
    "stores are told of the other layer": stored(lambda tell, layer: tell(1 - layer)),
    "stores are told too early": stored_early,
    "stores are told when the forward ends": stored_late,
    "stores are not told": stored(lambda tell, layer: None),
    "stores are told of the first layer only": stored(lambda tell, layer: tell(layer) if layer == 0 else None),
    "stores are told of K only": stored(lambda tell, layer: tell(layer, ["k"])),
    "attention's tables are not compared": attribute(TableCheck, "due", False),
}
"""By name, in the order of the table in the docs."""
