"""LoRA adapters of a real engine, and requests with these that are computed again."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tools.inspection import findings
from tools.parked_prefixes import parked_prompt, parked_verify
from tools.recomputes import begin, finish, prompt, recompute_traffic, verify

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ADAPTERS = {
    **dict(enable_lora=True, lora_backend="torch_native", max_lora_rank=8, max_loras_per_batch=3),
    "lora_target_modules": list(TARGETS),
}
"""`ServerArgs` of an engine with room for two adapters, and for none, in a batch."""
RANK = 4


def without_pins() -> None:
    """SGLang's layers for adapters keep numbers in pinned memory, of which a machine without a GPU has none."""
    for name in ("tensor", "empty", "zeros"):
        right = getattr(torch, name)
        setattr(torch, name, lambda *given, _right=right, pin_memory=False, **more: _right(*given, **more))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


def load_adapter(engine: Any, name: str, seed: int) -> str:
    """Loads an adapter with weights that matter by SGLang's own message; gives the id."""
    from safetensors.torch import save_file
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

    folder, numbers, weights = Path(tempfile.mkdtemp(prefix="adapter-")), torch.Generator().manual_seed(seed), {}
    config = engine.runner.model_config.hf_config
    head = engine.runner.model_config.head_dim
    hidden, q, kv = config.hidden_size, config.num_attention_heads * head, config.num_key_value_heads * head
    sizes = {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden)}
    for layer in range(config.num_hidden_layers):
        for part, (given, out) in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, given, generator=numbers) * given**-0.5
            weights[f"{place}.lora_B.weight"] = torch.randn(out, RANK, generator=numbers) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    about = dict(r=RANK, lora_alpha=RANK, target_modules=TARGETS, peft_type="LORA", bias="none", task_type="CAUSAL_LM")
    (folder / "adapter_config.json").write_text(json.dumps(about))
    # The model's weights are made up, an adapter's are read.
    engine.runner.lora_manager.load_config = LoadConfig()
    identity = f"id-of-{name}"
    done = engine.scheduler.load_lora_adapter(
        LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(folder), lora_id=identity)
    )
    if not done.success:
        raise RuntimeError(done.error_message)
    return identity


def adapted_traffic(engine: Any, rounds: int) -> dict[str, Any]:
    """Requests with two adapters, and with none, beside each other in each batch, with hits within each; a third one
    takes the place of another now and then. Gives outputs, verdicts by adapter, and all of `recompute_traffic`."""
    ids = [None, *(load_adapter(engine, name, seed) for seed, name in enumerate("abc"))]
    submit, first, count = engine.submit, len(engine.requests), 0

    def adapted(tokens: list[int], new_tokens: int, name: str | None = None, **more: Any) -> Any:
        nonlocal count
        count += 1
        return submit(tokens, new_tokens, name, lora_id=ids[count % 4], **more)

    heads = [prompt(f"head {n}", 60) for n in range(3)]
    asked = [[*heads[i % 3][: 20 * (i % 4)], *prompt(f"tail {i}", 35 + i % 40)] for i in range(rounds)]
    engine.submit = adapted
    try:
        done = recompute_traffic(engine, asked, 50)
    finally:
        del engine.submit
    whose = {request.rid: request.lora_id for request in engine.requests[first:]}
    # Others are of lessons, with a name of their own.
    answers = [answer for answer in done["answers"] if answer["request"] in whose]
    verdicts = Counter(f"{whose[answer['request']]} {answer['verdict']}" for answer in answers)
    return {**done, "by_adapter": verdicts}


def adapted_faults(engine: Any) -> dict[str, Any]:
    """An adapter's weights change in place under a kept cache, in SGLang's pool of adapters; then hits, with both
    adapters and none, and what ended requests left. Gives verdicts and findings."""
    findings(engine)
    tokens, ids = prompt("adapter", 60), {"a": "id-of-a", "b": "id-of-b", "none": None}
    for name, adapter in ids.items():
        parked_prompt(engine, f"{name} before", tokens, lora_id=adapter)
    pool = engine.runner.lora_manager.memory_pool
    (stacked,) = [buffer[0] for part, buffer in pool.B_buffer.items() if part == "o_proj"]
    stacked[pool.uid_to_buffer_id["id-of-a"]].mul_(1.2)
    for name, adapter in ids.items():
        engine.submit([*tokens, 7], 200, f"{name} hits", lora_id=adapter)
    engine.submit([2, *tokens[::-1]], 200, "a fresh", lora_id="id-of-a")
    names = [*(f"{name} hits" for name in ids), "a fresh"]
    begin(engine, {}, 0)
    running = [request for request in engine.requests if request.rid in names]
    while any(len(request.output_ids) < 2 for request in running):
        engine.step()
    hits = verify(engine, *names)
    finish(engine, *names)
    left = parked_verify(engine, names=[f"{name} before" for name in ids])
    found = {**left, "hits": hits}
    return {**found, "verdicts": [one["verdict"] for one in (*hits, *left["answers"])]}


def unloaded_adapter(engine: Any) -> dict[str, Any]:
    """An adapter is unloaded by SGLang's own message; then what it left is asked for."""
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

    parked_prompt(engine, "left", prompt("left", 60), lora_id="id-of-a")
    engine.scheduler.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name="a", lora_id="id-of-a"))
    return parked_verify(engine, names=["left"])
