"""SGLang: its scheduler and model runner in this process, turn by turn, or in SGLang's own loop where the overlap
scheduler is on."""

import contextlib
import random
from pathlib import Path
from typing import Any

import torch
from engines.driver import Engine
from tools import storms, traffic

from soak.plan import Asked, Plan
from soak.served import Round, Stepwise
from soak.setups import Setup

IDLE_TURNS = 8
"""An engine that has done nothing for so many turns has nothing to do: in some turns it only clears up."""


class SGLang(Stepwise):
    """``setup.options``: of `engines.driver.Engine`."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        super().__init__()
        self._engine = Engine(folder, dict(setup.options))
        self._overlapped = setup.options.get("disable_overlap_schedule") is False
        self._loop = self._engine.loop()
        # Everything that happens to an engine happens in its loop.
        self._loop.__enter__()

    @property
    def version(self) -> str:
        """Of the engine."""
        from importlib.metadata import version

        return version("sglang")

    def submit(self, name: str, asked: Asked) -> None:
        """Queues a request."""
        self._engine.submit(list(asked.tokens), asked.new, name, asked.salt or None)

    def abort(self, name: str) -> None:
        """As a client does."""
        self._engine.abort(name)

    def turn(self) -> bool:
        """One iteration of the scheduler's plain loop."""
        return self._engine.step()

    def ended(self) -> dict[str, list[int]]:
        """Answers since the last call; those that are not served to their end stay with SGLang."""
        ended = {}
        for request in [request for request in self._engine.requests if request.finished()]:
            self._engine.requests.remove(request)
            ended[request.rid] = list(request.output_ids)
            self.counts["cached"] += int(request.cached_tokens)
            self.counts["retracted"] += int(getattr(request, "retraction_count", 0) or 0)
            self.counts["verifies"] += int(getattr(request, "spec_verify_ct", 0) or 0)
        return ended

    def settle(self) -> None:
        """Turns until there is nothing left to do."""
        idle = 0
        while idle < IDLE_TURNS and not self._overlapped:
            idle = 0 if self.turn() else idle + 1
        self.ended()
        self._engine.requests.clear()

    def serve(
        self, plan: Plan, until: float, name: str = "", flip: random.Random | None = None
    ) -> dict[str, list[int]]:
        """As `Served.serve` says; with the overlap scheduler through SGLang's own loop."""
        if not self._overlapped:
            return super().serve(plan, until, name, flip)
        going = Round(self, plan, until, name)
        going.flip = flip
        turns = idle = 0

        def ingest(*args: Any, **kwargs: Any) -> list[Any]:
            nonlocal turns, idle
            busy = self._engine.scheduler.last_batch is not None
            if turns:
                going.after_turn(busy)
            turns += 1
            if going.on:
                going.before_turn()
                return []
            going.give_up()
            idle = 0 if busy else idle + 1
            if idle > IDLE_TURNS:
                raise _Served
            return []

        with contextlib.suppress(_Served):
            storms.loop(self._engine.scheduler, ingest)
        return going.finish()

    def flush(self) -> bool:
        """As a client may ask for."""
        if self._overlapped and not hasattr(self._engine.scheduler, "result_queue"):
            # SGLang makes it when its loop begins; nothing is cached yet.
            return True
        return traffic.flush(self._engine)

    def flip(self, draw: random.Random) -> bool:
        """A bit of K or V of the middle of a running request, by SGLang's own table."""
        for request in self._engine.requests:
            left = request.sampling_params.max_new_tokens - len(request.output_ids)
            row = self._row(request)
            if row is None or not request.output_ids or left < 6:
                continue
            slot = int(row[max(0, len(request.origin_input_ids) - 3)])
            pool = self._engine.runner.token_to_kv_pool
            pool = getattr(pool, "full_kv_pool", pool)
            buffers = getattr(pool, "kv_buffer", None) or draw.choice((pool.k_buffer, pool.v_buffer))
            cell = draw.choice(list(buffers))[slot].view(torch.uint8).view(-1)
            cell[draw.randrange(len(cell))] ^= 1 << 3
            return True
        return False

    def _row(self, request: Any) -> torch.Tensor | None:
        """The request's row of the table; None while it has none."""
        holder = request if hasattr(request, "req_pool_idx") else getattr(request, "kv", None)
        index = getattr(holder, "req_pool_idx", None)
        return None if index is None else self._engine.scheduler.req_to_token_pool.req_to_token[index]


class _Served(Exception):
    """The round is at its end."""


def make(setup: Setup, device: str, folder: Path) -> SGLang:
    """The engine of the setup."""
    return SGLang(setup, folder)
