"""`Guarded`: a toy engine under a Canary of its own, and all that was told of it."""

from collections.abc import Callable, Mapping

from support.toy import Request, ToyEngine
from torch import Tensor

from canary_core import Canary, CanaryConfig, Violation
from canary_core.plugins import private_hooks
from canary_core.testing import Findings


class Guarded:
    """``engine`` under guard: a fresh one by default. ``plugins`` hear of this Canary alone; ``settings`` are those of
    `CanaryConfig`, in log mode unless they say otherwise. ``pool_tensors``, ``warms_up``: see `Canary`. ``untested``:
    the engine counts as newer than tested."""

    def __init__(
        self,
        engine: ToyEngine | None = None,
        *plugins: object,
        pool_tensors: Callable[[], Mapping[str, Tensor]] | None = None,
        warms_up: bool = False,
        untested: bool = False,
        **settings: object,
    ) -> None:
        self.engine = engine or ToyEngine()
        self.findings = Findings()
        config = CanaryConfig.load(**{"mode": "log", "silence_s": 0, **settings})
        config = config.for_untested_engine() if untested else config
        # Registered last, so that it hears of everything even where one of the plugins raises.
        hooks = private_hooks(*plugins, self.findings)
        regions, writers = self.engine.regions(), self.engine.writers
        self.canary = Canary(
            regions, config, hooks=hooks, writers=writers, pool_tensors=pool_tensors, warms_up=warms_up
        )

    @property
    def violations(self) -> list[Violation]:
        """What was found so far."""
        return self.findings.violations

    def submit(self, name: str = "a", tokens: int = 3) -> Request:
        """A request of so many tokens, from 5 on."""
        return self.engine.submit(name, list(range(5, 5 + tokens)))

    def step(self, chunk: int = 8, fault: Callable[[], object] | None = None) -> None:
        """See `ToyEngine.step`."""
        self.engine.step(self.canary, chunk, fault)

    def decode(self) -> None:
        """A forward of one more token of each request."""
        for request in self.engine.requests:
            request.tokens.append(8)
        self.step()
