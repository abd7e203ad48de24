"""Transformers: continuous batching turn by turn, and `generate()` with caches of every kind."""

import random
import time
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import canary_transformers
import torch
import transformers
from canary_transformers.conformance.continuous import LAYERS, POSITIONS, ContinuousSession
from tiny import generation
from tiny.models import generating

from canary_core import Violation, start_plugins
from soak.plan import Asked, Plan
from soak.served import Late, Served, Stepwise
from soak.setups import Setup


def make(setup: Setup, device: str, folder: Path) -> Served:
    """The engine that the setup is for."""
    transformers.logging.set_verbosity_error()
    return Generate() if setup.model == "generate" else Continuous(setup)


class Continuous(Stepwise):
    """Continuous batching, its manager driven turn by turn; a pool so small that requests are taken out of it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        start_plugins()
        self._session = ContinuousSession(**setup.options)
        self._new: dict[str, int] = {}
        self._count()

    @property
    def version(self) -> str:
        """Of the engine."""
        return transformers.__version__

    def submit(self, name: str, asked: Asked) -> None:
        """Queues a request; there is one namespace only."""
        self._session.submit(name, asked.tokens, asked.new)
        self._new[name] = asked.new

    def abort(self, name: str) -> None:
        """As a client cancels it."""
        self._session._manager.cancel_request(name)
        self._new.pop(name)

    def turn(self) -> bool:
        """One round of the manager's loop."""
        return self._session.step()

    def ended(self) -> dict[str, list[int]]:
        """Answers since the last call."""
        answers = {name: list(self._session.answer(name)) for name, new in self._new.items()}
        ended = {name: tokens for name, tokens in answers.items() if len(tokens) == self._new[name]}
        for name in ended:
            del self._new[name]
        return ended

    def flush(self) -> bool:
        """Gives up all that is cached; forgets what was answered."""
        self._session.evict()
        self._session._prompts.clear()
        self._session._answers.clear()
        return True

    def flip(self, draw: random.Random) -> bool:
        """By the engine's own block tables, in the middle of a request's prompt."""
        for name, new in self._new.items():
            if 1 <= len(self._session.answer(name)) <= new - 6:
                position = len(self._session._prompts[name]) // 2
                self._session.poke(draw.randrange(LAYERS), draw.choice("kv"), name, position % POSITIONS)
                return True
        return False

    def _count(self) -> None:
        """Follows what the traffic does to the engine."""
        for owner, method, what in (
            (self._session._processor.offloading_manager, "offload_requests", "preempted"),
            (self._session._cache, "search_prefix_match", "cached"),
        ):
            setattr(owner, method, self._counted(getattr(owner, method), what))

    def _counted(self, method: Any, what: str) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.counts[what] += result if isinstance(result, int) else 1
            return result

        return counted


WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "static beams": {"num_beams": 2, "cache_implementation": "static"},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunks": {"prefill_chunk_size": 4, "cache_implementation": "static"},
}
"""Settings of `generate()`."""
KINDS = ("llama", "mistral", "gemma3", "qwen3")


class Generate(Served):
    """`generate()` of four tiny models: requests that come at once are the rows of one call, padded on the left."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: Counter[str] = Counter()
        self._found: list[Violation] = []
        self._guards: list[canary_transformers.Guard] = []
        self.resume()

    @property
    def version(self) -> str:
        """Of the engine."""
        return transformers.__version__

    def serve(
        self, plan: Plan, until: float, name: str = "", flip: random.Random | None = None
    ) -> dict[str, list[int]]:
        """One call of `generate()` for those that come at once, in a way that its number says."""
        answers = {}
        for number, (_, together) in enumerate(groupby(plan.asked, key=lambda asked: asked.turn)):
            if time.time() > until:
                raise Late
            draw = random.Random(f"generate {plan.number} {number}")
            answers |= self._generate(list(together), draw, flip)
        return answers

    def _generate(self, rows: list[Asked], draw: random.Random, flip: random.Random | None) -> dict[str, list[int]]:
        way = draw.choice(list(WAYS)) if flip is None else "dynamic"
        # It drafts for one request only.
        rows = rows[:1] if way == "lookup" else rows
        model = generating(draw.choice(KINDS))
        longest = max(len(row.tokens) for row in rows)
        ids = torch.tensor([[0] * (longest - len(row.tokens)) + list(row.tokens) for row in rows])
        settings = {**WAYS[way], "max_new_tokens": max(row.new for row in rows), "attention_mask": (ids != 0).long()}
        if flip is not None:
            settings |= self._flipping(model, flip)
        out = generation.generate(model, ids, **settings)
        self.counts[way] += 1
        self.witness.canaries.clear()
        each = len(out) // len(rows)
        return {row.name: out[each * i : each * (i + 1), longest:].flatten().tolist() for i, row in enumerate(rows)}

    def _flipping(self, model: Any, draw: random.Random) -> dict[str, Any]:
        """A cache of one's own, of which a bit is flipped once the prompt is in it."""
        cache = generation.new_cache(model, "dynamic")
        embed = model.get_input_embeddings()

        def before(*args: Any) -> None:
            if cache.get_seq_length() > 3:
                hook.remove()
                generation.flip(cache, 2, draw.choice(("keys", "values")), 0, -2)

        hook = embed.register_forward_pre_hook(before)
        return {"cache": cache}

    def flush(self) -> bool:
        """Each call has a cache of its own."""
        return True

    def stats(self) -> dict[str, int]:
        """Of all caches so far."""
        total = Counter(self._ended)
        for guard in self._guards:
            total.update(guard.stats())
        return dict(total)

    def violations(self) -> list[Violation]:
        """What was found so far."""
        return self.witness.violations

    def pause(self) -> None:
        """Ends the guards."""
        for guard in self._guards:
            guard.close()
            self._ended.update(guard.stats())
        self._guards.clear()

    def resume(self) -> None:
        """Guards the models again."""
        self._guards = [canary_transformers.guard(generating(kind)) for kind in KINDS]
