"""Transformers' stages: continuous batching step by step, and `generate()`. Each bug has its own guard and cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bugs.museum import PROFILES, Stage

WINDOWS = {"continuous": "llama", "continuous_windows": "gemma3"}
"""Setups with continuous batching, and the model of each; the other ones are the models of `tiny.models.generating`."""


class GuardedStage(Stage):
    """``model`` under a guard with no setting but the profile."""

    def __init__(self, model: Any, profile: str) -> None:
        super().__init__()
        from canary_transformers import guard

        self.guard = guard(model, profile=PROFILES[profile], log_level="error")
        self._seen = 0

    @property
    def forwards(self) -> int:
        return int(self.guard.stats().get("forwards", 0))

    def findings(self) -> list[Any]:
        for canary in self.canaries():
            canary.drain()
        found = self.guard.violations[self._seen :]
        self._seen += len(found)
        return found

    def canaries(self) -> Iterator[Any]:
        """Those of all caches that are guarded now."""
        for session in self.guard._sessions:
            yield session.canary

    def close(self) -> None:
        """Ends the guard."""
        self.guard.close()


class ContinuousStage(GuardedStage):
    """Continuous batching, whose loop is run by `step`."""

    def __init__(self, model: Any, profile: str) -> None:
        from canary_transformers.conformance.continuous import ContinuousSession

        self.session: Any = None
        # The guard must be there when the engine makes its cache, and be of the very model.
        made = ContinuousSession(model)
        made.close()
        super().__init__(made._model, profile)
        self.session = ContinuousSession(model)
        self.cache = self.session._cache
        self.processor = self.session._processor
        self.allocator = self.cache.layer_to_allocator[0]

    def submit(self, name: str, tokens: Sequence[int], new_tokens: int) -> None:
        self.session.submit(self.phase + name, [token % 120 + 3 for token in tokens], new_tokens)

    def step(self) -> bool:
        return bool(self.session.step())

    def answered(self, name: str) -> int:
        return len(self.session.answer(self.phase + name))

    def answers(self) -> dict[str, list[int]]:
        own = {name: told for name, told in self.session._answers.items() if not name.startswith("clean-")}
        return {name: list(told) for name, told in own.items()}

    def close(self) -> None:
        self.session.close()
        super().close()


class GenerateStage(GuardedStage):
    """`generate()` and direct calls of a tiny model, by the helpers of canary-transformers' tests."""

    @property
    def forwards(self) -> int:
        """Of the cache that is guarded now: each counts its own."""
        caches = self.guard._caches
        return int(caches[-1].stats().get("forwards", 0)) if caches else 0

    def __init__(self, model: str, profile: str) -> None:
        from tiny.models import generating

        self.model = generating(model)
        super().__init__(self.model, profile)


@contextmanager
def stage(setup: str, profile: str) -> Iterator[GuardedStage]:
    """The stage of a setup: ``continuous``, ``continuous_windows``, or the name of a model that generates."""
    made = ContinuousStage(WINDOWS[setup], profile) if setup in WINDOWS else GenerateStage(setup, profile)
    try:
        yield made
    finally:
        made.close()
