"""vLLM's own ``load_inplace``: another content of a LoRA adapter under the same name and path."""

import json
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
    """Nothing of the engine is replaced: the adapter is loaded again, as its API allows."""
    stage.other = True
    yield


def traffic(stage: Any) -> None:
    """Alice is served with an adapter; it is loaded again, where the engine is sound from the same files; Bob asks the
    same."""
    folder = Path(tempfile.mkdtemp(prefix="canary-live-"))
    write_adapter(folder, stage.runner.model_config.hf_config, 1)
    asked = stage.tokens("alice", 70)
    submit(stage, "alice", asked, request(folder, load_inplace=False))
    finish(stage)
    if getattr(stage, "other", False):
        write_adapter(folder, stage.runner.model_config.hf_config, 2)
        stage.strike()
    stage.small.core.add_lora(request(folder, load_inplace=True))
    submit(stage, "bob", asked, request(folder, load_inplace=False))
    finish(stage)


def request(folder: Path, load_inplace: bool) -> Any:
    """The adapter, as clients name it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("sql", 1 + sum(str(folder).encode()) % 999, str(folder), load_inplace=load_inplace)


def submit(stage: Any, name: str, tokens: list[int], lora: Any) -> None:
    """Queues a request for the adapter."""
    stage.small.submit(stage.phase + name, tokens, 4, lora_request=lora)


def write_adapter(folder: Path, config: Any, seed: int) -> None:
    """As PEFT saves it, of the queries and values."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    out = {"q_proj": head * config.num_attention_heads, "v_proj": head * config.num_key_value_heads}
    about = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": [*out],
        "bias": "none",
        "lora_dropout": 0.0,
    }
    folder.joinpath("adapter_config.json").write_text(json.dumps(about))
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, size in out.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, config.hidden_size, generator=draw) * 0.1
            weights[f"{at}.lora_B.weight"] = torch.randn(size, 8, generator=draw) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")


BUG = Bug(
    title="A LoRA adapter loaded again in place",
    cause="Hashes of blocks have the adapter's name, not its content, so KV of the old content is hit.",
    row=IDENTITY,
    issues=("vllm#42125",),
    setup="lora",
    broken=broken,
    traffic=traffic,
    default=Found(
        "prefix",
        1,
        "bob will read position 0 from slot ..., which alice computed at step ... with the weights of the start, LoRA "
        "adapter sql of ...; bob began with the weights of change 1 (sql was loaded again), LoRA adapter sql of ... A "
        "prefix hit across a change of the weights: the prefix cache was kept.",
    ),
)
