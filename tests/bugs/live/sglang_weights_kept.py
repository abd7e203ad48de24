"""SGLang's own update of the weights with ``flush_cache=False``."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bugs.classes import IDENTITY
from bugs.museum import Bug, Found
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: its prefix cache is kept, as its API allows."""
    stage.flush_cache = False
    yield


def traffic(stage: Any) -> None:
    """Alice is served; the weights are updated from a folder; Bob begins like Alice."""
    asked = stage.tokens("alice", 40)
    stage.submit("alice", asked, 4)
    finish(stage)
    update(stage, getattr(stage, "flush_cache", True))
    stage.submit("bob", [*asked, *stage.tokens("bob", 5)], 4)
    finish(stage)


def update(stage: Any, flush_cache: bool) -> None:
    """As `POST /update_weights_from_disk` has the scheduler do it."""
    from safetensors.torch import save_file
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    folder = Path(tempfile.mkdtemp(prefix="canary-live-"))
    save_file(checkpoint(stage.runner.model_config.hf_config, seed=1 + flush_cache), folder / "model.safetensors")
    if not flush_cache:
        stage.strike()
    request = UpdateWeightFromDiskReqInput(model_path=str(folder), load_format="auto", flush_cache=flush_cache)
    done = stage.scheduler._request_dispatcher(request)
    if not done.success:
        raise RuntimeError(done.message)


def checkpoint(config: Any, seed: int) -> dict[str, Any]:
    """A Llama's weights as they are trained elsewhere, by Hugging Face's names."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, key = head * config.num_attention_heads, head * config.num_key_value_heads
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "lm_head.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (key, hidden) for name in "kv"}
        shapes |= {f"{at}.self_attn.q_proj.weight": (query, hidden), f"{at}.self_attn.o_proj.weight": (hidden, query)}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
    weights = {name: torch.randn(shape, generator=draw) * 0.15 for name, shape in shapes.items()}
    names = ("input_layernorm", "post_attention_layernorm")
    norms = [f"model.layers.{layer}.{name}.weight" for layer in range(config.num_hidden_layers) for name in names]
    return weights | {name: torch.ones(hidden) for name in (*norms, "model.norm.weight")}


BUG = Bug(
    title="Weights updated, and the prefix cache kept",
    cause="`flush_cache=False` keeps KV of the old weights, which later requests hit.",
    row=IDENTITY,
    issues=("lmdeploy#4917", "prime-rl#1650", "RLinf#96"),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found(
        "prefix",
        1,
        "bob will read position 0 from slot ..., which alice computed at step ... with the weights of ...; bob began "
        "with the weights of change ... (update_weights_from_disk). A prefix hit across a change of the weights: the "
        "prefix cache was kept.",
    ),
)
