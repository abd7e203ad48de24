"""`Verified`: an engine whose requests are computed again, and the ways to break its own forwards from outside."""

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar
from unittest import mock

import pytest
import torch
from canary_transformers.conformance import continuous
from canary_transformers.conformance.continuous import ContinuousSession
from canary_transformers.tiny_models import tiny_model

from canary_core.testing import Findings

PROMPT, NEW = 40, 60
HIT = 32
"""Tokens of a shared prompt in whole blocks."""


def tokens(random_: random.Random, count: int = PROMPT) -> list[int]:
    """A prompt that nobody else has."""
    return [random_.randrange(3, 120) for _ in range(count)]


Made = TypeVar("Made", bound="Verified")


class Verified:
    """One engine without its thread, under guard, driven step by step. ``broken``: wrong things are done in steps, and
    by the engine only. ``dtype``: of a copy of the model; None leaves the model as it is. ``make``: gives
    another model."""

    def __init__(
        self, guard: Any, name: str = "llama", asynchronous: bool = False, dtype: Any = None, make: Any = tiny_model,
        **settings: Any,
    ) -> None:  # fmt: skip
        def cast(*args: Any) -> Any:
            return make(*args) if dtype is None else copy.deepcopy(make(*args)).to(dtype)

        with mock.patch.object(continuous, "tiny_model", cast):
            self.engine = ContinuousSession(name, asynchronous)
        self.model = self.engine._model
        self.findings = Findings()
        self.guard = guard(self.model, read_check=0, log_level="error", **settings)
        self.guard.register(self.findings)
        self.random = random.Random(name)
        self.broken = False
        self._in_step = False

    @property
    def recompute(self) -> Any:
        """Of the only session."""
        return self.guard._sessions[0].verifier.recompute

    @property
    def acts(self) -> bool:
        """Whether the engine computes a forward of its own now, and is broken."""
        return self.broken and self._in_step

    def close(self) -> None:
        """The engine ends."""
        self.engine.close()

    def step(self, count: int = 1) -> None:
        """So many steps, fewer if there is nothing to do."""
        for _ in range(count):
            self._in_step = True
            more = self.engine.step()
            self._in_step = False
            if not more:
                return

    def finish(self) -> None:
        """Until all requests have ended."""
        self.step(400)

    def submit(self, name: str, prompt: list[int] | None = None, new: int = NEW) -> None:
        """A request of 40 tokens and more."""
        self.engine.submit(name, prompt or tokens(self.random), new)

    def prefix(self) -> list[int]:
        """Whole blocks of the prefix cache, left there by a request that nobody verifies."""
        made = tokens(self.random, HIT)
        self.submit("prefix", [*made, *tokens(self.random, 8)], 2)
        self.finish()
        return made

    def taught(self, prefix: Sequence[int] = ()) -> None:
        """The noise is known from fresh requests, or from those that hit this ``prefix``; nothing was found in them."""
        for n in range(4):
            self.submit(f"fresh {n}", [*prefix, *tokens(self.random, PROMPT - len(prefix))], 50)
            self.step(45)
            answer = self.answer(f"fresh {n}")
            # Equal bits need no noise to be known.
            assert answer.verdict == "same" or "not known yet" in answer.reason
            self.finish()
        assert self.recompute.noise.known

    def traffic(self, rounds: int, prefixes: Sequence[list[int]] = ()) -> list[Any]:
        """Hits, forks and preemptions, in one batch and alone, verified again and again. Returns the verdicts."""
        prefixes = prefixes or [tokens(self.random, 24) for _ in range(3)]
        judged = []
        for n in range(rounds):
            for m in range(3):
                self.submit(f"{n} {m}", self.random.choice(prefixes) + tokens(self.random, 16), 30)
            for turn in range(3):
                self.step(14)
                answers = self.recompute.now()
                judged += [answer for answer in answers if answer.verdict != "unjudged"]
                running = self.engine._processor.scheduler.active_requests
                if turn == 0 and running:
                    self.engine.fork(next(iter(running)), f"{n} child")
                elif turn == 1 and len(running) > 1:
                    self.engine.preempt(next(reversed(running)))
            self.finish()
        return judged

    def answer(self, request: str) -> Any:
        """The verification of a request."""
        (answer,) = self.recompute.now(request)
        return answer


def several(make: Callable[..., Made]) -> Iterator[Callable[..., Made]]:
    """For a fixture: gives ``make``. In the end models have the weights that they were made with, and engines end."""
    made: list[tuple[Made, dict[str, torch.Tensor]]] = []

    def one(*args: Any, **kwargs: Any) -> Made:
        verified = make(*args, **kwargs)
        made.append((verified, {name: w.clone() for name, w in verified.model.state_dict().items()}))
        return verified

    yield one
    for verified, weights in made:
        verified.model.load_state_dict(weights)
        verified.close()


def weights_change(verified: Verified, patch: pytest.MonkeyPatch) -> None:
    """One matrix of layer 1 is scaled by 1 % under a running request."""
    with torch.no_grad():
        verified.model.model.layers[1].self_attn.v_proj.weight.mul_(1.01)


def every_third_key(verified: Verified, patch: pytest.MonkeyPatch) -> None:
    """Every third token that the engine computes has keys of another sign in layer 2."""
    project = verified.model.model.layers[2].self_attn.k_proj
    compute, count = project.forward, itertools.count(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = compute(x)
        if verified.acts:
            signs = [-1.0 if next(count) % 3 == 0 else 1.0 for _ in range(made.shape[1])]
            made = made * made.new_tensor(signs)[None, :, None]
        return made

    patch.setattr(project, "forward", forward)


def rope_after_a_hit(verified: Verified, patch: pytest.MonkeyPatch) -> None:
    """Positions behind a hit are rotated as if one further on."""
    rotary = verified.model.model.rotary_emb
    rotate = rotary.forward

    def forward(x: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        wrong = position_ids + (position_ids >= HIT) if verified.acts else position_ids
        return rotate(x, wrong, *args, **kwargs)

    patch.setattr(rotary, "forward", forward)


def one_short(verified: Verified, patch: pytest.MonkeyPatch) -> None:
    """In decodes attention is not shown the last of its keys."""
    runner = verified.engine._processor.model_runner
    compute = runner._forward_process_and_sample

    def forward(model: Any, batch: Any, *args: Any) -> Any:
        if verified.acts and decodes(verified):
            batch = {**batch, "attention_mask": shortened(batch["attention_mask"])}
        return compute(model, batch, *args)

    patch.setattr(runner, "_forward_process_and_sample", forward)


def window_off_by_one(verified: Verified, patch: pytest.MonkeyPatch) -> None:
    """In decodes a window ends one token early."""
    runner = verified.engine._processor.model_runner
    compute = runner._forward_process_and_sample

    def forward(model: Any, batch: Any, *args: Any) -> Any:
        if verified.acts and decodes(verified):
            masks = dict(batch["attention_mask"])
            masks["sliding_attention"] = shortened(masks["sliding_attention"], key=0)
            batch = {**batch, "attention_mask": masks}
        return compute(model, batch, *args)

    patch.setattr(runner, "_forward_process_and_sample", forward)


def shortened(mask: Any, key: int = -1) -> Any:
    """Without the last visible key of the first query, or another one."""
    if isinstance(mask, dict):
        return {name: shortened(one, key) for name, one in mask.items()}
    mask = mask.clone()
    shown = (mask[0, 0, 0] if mask.dtype == torch.bool else mask[0, 0, 0] == 0).nonzero()[:, 0]
    mask[0, 0, 0, shown[key]] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return mask


class Faulty(Protocol):
    """An engine with a fault. acts: whether it is there in the present forward."""

    model: Any

    @property
    def acts(self) -> bool: ...


def skipped_layer(faulty: Faulty, patch: pytest.MonkeyPatch) -> None:
    """What layer 1 computes is thrown away."""
    layer = faulty.model.model.layers[1]
    compute = layer.forward

    def forward(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        made = compute(hidden, *args, **kwargs)
        return hidden if faulty.acts else made

    patch.setattr(layer, "forward", forward)


def noisy_head(verified: Verified, patch: pytest.MonkeyPatch) -> None:
    """In decodes the first head of layer 0 gives 5 % of noise."""
    output = verified.model.model.layers[0].self_attn.o_proj
    compute = output.forward
    noise = torch.Generator().manual_seed(3)

    def forward(heads: Any) -> Any:
        if verified.acts and decodes(verified):
            heads = heads.clone()
            heads[..., :16] *= 1 + 0.05 * torch.randn(heads[..., :16].shape, generator=noise)
        return compute(heads)

    patch.setattr(output, "forward", forward)


def decodes(verified: Verified) -> bool:
    """Whether the engine's batch has one new token."""
    (scheduled,) = verified.engine._processor.inputs_and_outputs.requests_in_batch
    return bool(scheduled.query_length == 1)
