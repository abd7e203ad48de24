import gc
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

pytest.importorskip("transformers", reason="canary-transformers' tests run the real engine: pip install transformers")

import canary_transformers
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from canary_core.hookspecs import hookimpl

PAGE = 8
WINDOW = 12
SLIDING = "sliding_attention"
LAYERS = 4


@dataclass(frozen=True)
class Traffic:
    """What to serve: ``requests`` random prompts, half of them with a shared prefix, and how tight the engine is."""

    seed: int = 0
    requests: int = 8
    new_tokens: int = 10
    samples: int = 1
    pages: int = 40
    batch_tokens: int = 48
    options: dict[str, Any] = field(default_factory=dict)

    def prompts(self) -> list[list[int]]:
        """Prompts of 1 to 60 tokens; longer than a batch now and then, so that prefills are chunked."""
        r = random.Random(self.seed)
        shared = [r.randrange(3, 500) for _ in range(40)]
        long = [[r.randrange(3, 500) for _ in range(60)]]
        begins = [shared[: r.randrange(5, 40)] if r.random() < 0.5 else [] for _ in range(self.requests - 1)]
        return long + [begin + [r.randrange(3, 500) for _ in range(r.randrange(1, 25))] for begin in begins]

    def generation(self) -> GenerationConfig:
        """Greedy, or sampled where one prompt has several answers."""
        return GenerationConfig(
            max_new_tokens=self.new_tokens,
            do_sample=self.samples > 1,
            num_return_sequences=self.samples,
            eos_token_id=-1,
            pad_token_id=0,
        )

    def engine(self, model: Any) -> ContinuousBatchingConfig:
        """Small pages and a small pool."""
        known = {f.name for f in fields(ContinuousBatchingConfig)}
        settings = {"num_blocks": self.pages, "max_batch_tokens": self.batch_tokens, "seed": self.seed}
        if "page_size" in known:
            settings["page_size"] = PAGE
        else:
            # Up to 5.17 a block is one of a group's layers, not all; and an engine that is too tight gives up.
            mixed = len(set(model.config.layer_types or ())) > 1 if hasattr(model.config, "layer_types") else False
            settings |= {"block_size": PAGE, "num_blocks": 2 * self.pages * (LAYERS if mixed else 1)}
        if "auto_switch_to_flash" in known:
            settings["auto_switch_to_flash"] = False
        return ContinuousBatchingConfig(**settings, **self.options)


Serve = Callable[[Any, Traffic], dict[str, list[int]]]


@pytest.fixture(scope="session", autouse=True)
def quick_engine() -> Iterator[None]:
    """The engine collects garbage at each stop, which with everything imported takes most of a test's time."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def build() -> Callable[[str], Any]:
    """A tiny random model of a kind, the same one each time."""
    made: dict[str, Any] = {}

    def build_model(kind: str) -> Any:
        if kind not in made:
            made[kind] = _new_model(kind)
        return made[kind]

    return build_model


@pytest.fixture(scope="session")
def serve() -> Serve:
    """Runs traffic through `generate_batch`; gives the tokens by request. Raises if a request failed."""

    def run(model: Any, traffic: Traffic) -> dict[str, list[int]]:
        torch.manual_seed(traffic.seed)
        outputs = model.generate_batch(
            traffic.prompts(), generation_config=traffic.generation(), continuous_batching_config=traffic.engine(model)
        )
        failed = {name: output.error for name, output in outputs.items() if output.error}
        # Up to 5.17 the answers of forked requests are computed, but not handed out.
        if failed or len(outputs) not in (traffic.requests, traffic.requests * traffic.samples):
            raise RuntimeError(f"{len(outputs)} outputs, failed: {failed}")
        return {name: output.generated_tokens for name, output in outputs.items()}

    return run


@pytest.fixture
def guard() -> Iterator[Callable[..., canary_transformers.Guard]]:
    """`canary_transformers.guard` with all bytes re-read before each forward; closed after the test."""
    guards = []

    def start(model: Any, **config: Any) -> canary_transformers.Guard:
        guards.append(canary_transformers.guard(model, **{"read_check": -1, "scrub_budget": "64KiB", **config}))
        return guards[-1]

    yield start
    for one in guards:
        one.close()


class AtStep:
    """Does ``act(canary, batch)`` once, before the check of forward ``step`` (or after it), and remembers having."""

    def __init__(self, step: int, act: Callable[[Any, Any], None], after: bool = False) -> None:
        self.step = step
        self.act = act
        self.after = after
        self.done = False

    @hookimpl
    def canary_pre_forward(self, canary: Any, batch: Any) -> None:
        if not self.after:
            self._maybe(canary, batch)

    @hookimpl
    def canary_post_forward(self, canary: Any, batch: Any) -> None:
        if self.after:
            self._maybe(canary, batch)

    def _maybe(self, canary: Any, batch: Any) -> None:
        if not self.done and canary.forwards >= self.step:
            self.done = self.act(canary, batch) is not False


@pytest.fixture(scope="session")
def has_pool() -> bool:
    """Whether the cache starts cleared, and has a pool that blocks go back to: from 5.18 on."""
    return any(f.name == "page_size" for f in fields(ContinuousBatchingConfig))


@pytest.fixture
def at_step() -> type[AtStep]:
    """See `AtStep`."""
    return AtStep


@pytest.fixture
def traffic() -> type[Traffic]:
    """See `Traffic`."""
    return Traffic


def _new_model(kind: str) -> Any:
    torch.manual_seed(0)
    config, model, extra = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
        "gemma3": (
            "Gemma3TextConfig",
            "Gemma3ForCausalLM",
            {"sliding_window": WINDOW, "layer_types": [SLIDING, "full_attention", SLIDING, SLIDING]},
        ),
    }[kind]  # fmt: skip
    made = getattr(transformers, model)(
        getattr(transformers, config)(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            initializer_range=0.5,
            max_position_embeddings=512,
            pad_token_id=0,
            **extra,
        )
    ).eval()
    made.set_attn_implementation("sdpa")
    return made


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models lose more by threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
