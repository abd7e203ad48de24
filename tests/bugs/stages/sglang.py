"""SGLang's stage: a real scheduler and model runner in a process of its own, of which each bug gets a fork."""

from collections.abc import Sequence
from typing import Any

from bugs.museum import Stage

TURNS = 4
"""A scheduler that has requests runs some of them in one of so many turns."""


class SGLangStage(Stage):
    """``driver``: an `engines.driver.Engine`. What belongs to SGLang has SGLang's names."""

    def __init__(self, driver: Any) -> None:
        super().__init__()
        self.driver = driver
        self.scheduler = driver.scheduler
        self.runner = driver.runner
        self.pool = driver.runner.token_to_kv_pool
        self.allocator = driver.scheduler.token_to_kv_pool_allocator
        self.tree = driver.scheduler.tree_cache
        self.table = driver.scheduler.req_to_token_pool
        self.requests: dict[str, Any] = {}

    @property
    def forwards(self) -> int:
        return int(self.driver.session.canary.forwards)

    def findings(self) -> list[Any]:
        for canary in self.driver.canaries:
            canary.drain()
        found, self.driver.told.violations = self.driver.told.violations, []
        return found

    def submit(self, name: str, tokens: Sequence[int], new_tokens: int, namespace: str | None = None) -> None:
        self.requests[name] = self.driver.submit(list(tokens), new_tokens, self.phase + name, namespace)

    def step(self) -> bool:
        return any(self.driver.step() for _ in range(TURNS))

    def answered(self, name: str) -> int:
        return len(self.requests[name].output_ids)

    def answers(self) -> dict[str, list[int]]:
        return {name: [int(token) for token in request.output_ids] for name, request in self.requests.items()}
