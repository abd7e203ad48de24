"""An engine under guard, and random traffic."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from canary_vllm.hooks import HOOKS

from canary_core import Canary, CanaryConfig, Patches, hook_manager
from canary_core.testing import FaultInjector, FaultSpec, Findings
from vllm_on_cpu.engine import SmallEngine


class Guarded:
    """``engine`` while it is guarded. ``findings``: all that Canary tells."""

    def __init__(self, engine: SmallEngine, findings: Findings) -> None:
        self.engine = engine
        self.findings = findings

    @property
    def canary(self) -> Canary:
        """That of the engine's runner."""
        (session,) = HOOKS.sessions
        return session.canary

    def trouble(self) -> list[str]:
        """All that is no good news, after a drain; also a token that vLLM's scheduler has given to its worker and
        Canary has not recorded, or one too many."""
        uncounted = []
        for session in HOOKS.sessions:
            session.canary.drain()
            witness = session.canary.witness
            if witness.computed_tokens and witness.computed_tokens != witness.guarded_tokens:
                uncounted.append(f"{witness.guarded_tokens} tokens of {witness.computed_tokens} guarded")
        told = [f"{e.name} {e.fields}" for e in self.findings.events if e.level in ("warning", "error")]
        return [*map(str, self.findings.violations), *told, *uncounted]


@contextmanager
def guard(engine: SmallEngine, *plugins: object, **settings: Any) -> Iterator[Guarded]:
    """Guards ``engine``, whose KV cache is made anew for it, by nothing but the plugin's hooks."""
    findings = Findings()
    listeners = (findings, *plugins)
    for listener in listeners:
        hook_manager().register(listener)
    try:
        HOOKS.start(CanaryConfig.load(**{"read_check": -1, "scrub_budget": "0", "stats_interval": 0, **settings}))
        engine.renew()
        yield Guarded(engine, findings)
    finally:
        HOOKS.stop()
        for listener in listeners:
            hook_manager().unregister(listener)


@contextmanager
def flip_behind_a_store(engine: SmallEngine, layer: int, half: str, request: str) -> Iterator[list[int]]:
    """The bug of a stray write: what comes after the attention of ``layer`` in the model flips, once, a bit that the
    layer has just stored, of the last token that vLLM's scheduler has sent for ``request``. Yields its position."""
    patches, done = Patches(), list[int]()

    def make(original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not done:
                done.append(engine.scheduler.requests[request].num_computed_tokens - 1)
                engine.poke(layer, half, request, done[0])
            return original(*args, **kwargs)

        return forward

    block = engine.runner.model.model.layers[layer]
    patches.wrap(getattr(block, "mlp", None) or block.feed_forward, "forward", make)
    try:
        yield done
    finally:
        patches.undo()


def prompts(seed: object, count: int = 8, longest: int = 110) -> list[list[int]]:
    """Prompts of all lengths, of which most begin like others."""
    draw = random.Random(f"vllm {seed}")
    head = [draw.randrange(3, 500) for _ in range(longest)]
    return [
        head[: draw.choice((0, 20, 40, 70, 100))] + [draw.randrange(3, 500) for _ in range(draw.randrange(1, 40))]
        for _ in range(count)
    ]


def traffic(engine: SmallEngine, rounds: int, seed: object = 0, new_tokens: int = 24) -> list[list[list[int]]]:
    """Answers of so many rounds of requests at once; every third round asks what the one before did."""
    asked: Sequence[Sequence[int]] = ()
    answers = []
    for turn in range(rounds):
        asked = asked if turn % 3 == 2 else prompts(f"{seed} {turn}")
        answers.append(engine.serve(asked, new_tokens, f"t{turn}"))
    return answers


def injector(fault: str, source: str | None = None) -> FaultInjector:
    """Injects one fault of Canary's own."""
    return FaultInjector([FaultSpec(fault=fault, warmup=2, probability=1.0, source=source)], seed=1)
