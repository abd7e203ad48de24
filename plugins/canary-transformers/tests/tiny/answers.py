"""`Answers`: `generate()` and direct calls whose rows are computed again, and ways to break the model from outside."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from canary_transformers import second_forward
from transformers import DynamicCache, GenerationConfig, StaticCache

from canary_core import Verification
from canary_core.testing import Findings
from tiny.generation import CACHE
from tiny.models import ANSWERING_WINDOW as WINDOW
from tiny.models import answering

PROMPT, NEW = 40, 44


class Answers:
    """One guarded model. ``broken``: wrong things are done in its own forwards, not in Canary's."""

    def __init__(self, guard: Any, kind: str = "llama", floats: str = "float32", **settings: Any) -> None:
        self.kind = kind
        self.model = answering(kind, floats)
        self.findings = Findings()
        self.guard = guard(self.model, read_check=0, log_level="error", **settings)
        self.guard.register(self.findings)
        self.random = random.Random(kind)
        self.broken = self.again = False

    def prompts(self, rows: int = 1, tokens: int = PROMPT) -> torch.Tensor:
        """Never the same twice."""
        return torch.tensor([[self.random.randrange(3, 250) for _ in range(tokens)] for _ in range(rows)])

    def generate(self, ids: torch.Tensor, **settings: Any) -> Any:
        """The answer with its cache."""
        given = {
            name: settings.pop(name) for name in (CACHE, "attention_mask", "stopping_criteria") if name in settings
        }
        config = GenerationConfig(
            **{
                "max_new_tokens": NEW,
                "do_sample": False,
                "pad_token_id": 0,
                "return_dict_in_generate": True,
                **settings,
            }
        )
        config.eos_token_id = None
        given.setdefault("attention_mask", (ids != 0).long())
        return self.model.generate(ids, generation_config=config, **given)

    def call(self, cache: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        """A direct call; gives the next tokens."""
        with torch.no_grad():
            logits = self.model(input_ids=ids, **{CACHE: cache}, **more).logits
        return logits[:, -1:].argmax(-1)

    def cache(self, static: bool = False) -> Any:
        """An empty one."""
        return (
            StaticCache(config=self.model.config, max_cache_len=200)
            if static
            else DynamicCache(config=self.model.config)
        )

    def taught(self) -> None:
        """The noise is known from fresh requests, in which nothing was found."""
        # Where all layers have a window, only its tokens teach.
        rows = 8 if self.model.config.model_type == "mistral" else 4
        kept = self.generate(self.prompts(rows), max_new_tokens=26, do_sample=True)
        for answer in self.guard.verify():
            # Equal bits need no noise to be known.
            assert answer.verdict == "same" or "not known yet" in str(answer.reason), answer.table()
        assert kept is not None
        assert self.guard.violations == []

    def verdicts(self) -> list[Verification]:
        """Of all rows that there are."""
        found: list[Verification] = self.guard.verify()
        return found

    @property
    def acts(self) -> bool:
        """Whether the model computes a forward of its user's, and is broken."""
        return self.broken and not self.again

    def mark(self, patch: pytest.MonkeyPatch) -> None:
        """`again` says from now on whether Canary computes."""
        compute = second_forward.run

        def run(*args: Any, **kwargs: Any) -> Any:
            self.again = True
            try:
                return compute(*args, **kwargs)
            finally:
                self.again = False

        patch.setattr(second_forward, "run", run)


def shifted_positions(answers: Answers, patch: pytest.MonkeyPatch) -> None:
    """Rotated as if one further on."""
    rotary = answers.model.model.rotary_emb
    rotate = rotary.forward

    def forward(x: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return rotate(x, position_ids + 1 if answers.acts else position_ids, *args, **kwargs)

    patch.setattr(rotary, "forward", forward)


def one_short(answers: Answers, patch: pytest.MonkeyPatch) -> None:
    """Attention of all layers of a decode is not shown the token before the last."""
    for index, layer in enumerate(answers.model.model.layers):
        patch.setattr(layer.self_attn, "forward", _one_short(answers, index, layer.self_attn))


def _one_short(answers: Answers, index: int, attention: Any) -> Callable[..., Any]:
    compute = attention.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if answers.acts and hidden_states.shape[1] == 1:
            keys = kwargs[CACHE].get_seq_length(index) + 1
            shown = min(keys, WINDOW) if getattr(attention, "is_sliding", False) else keys
            mask = torch.zeros(len(hidden_states), 1, 1, shown, dtype=hidden_states.dtype)
            mask[..., -2] = torch.finfo(hidden_states.dtype).min
            kwargs["attention_mask"] = mask
        return compute(hidden_states, *args, **kwargs)

    return forward


def weights_change(answers: Answers, by: float = 1.05) -> None:
    """One matrix of layer 1 is scaled."""
    with torch.no_grad():
        answers.model.model.layers[1].self_attn.v_proj.weight.mul_(by)
