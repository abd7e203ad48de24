"""Requests of a small engine that are computed again, and engines that compute wrongly: broken from outside, by nothing
but vLLM and torch."""

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from canary_vllm.hooks import HOOKS

from canary_adapters import RecomputePair
from canary_core import Patches, Verification
from vllm_on_cpu import models
from vllm_on_cpu.engine import SmallEngine

DECODED = 40
"""Enough tokens of a decode for a verdict."""


def weighty(name: str = "llama", layers: int = 3) -> str:
    """A folder with the model ``name`` and weights of a size at which layers matter: those that vLLM makes up are a
    thousandth, and change nothing."""
    from safetensors.torch import save_file

    folder = Path(models.folder(name, Path(tempfile.mkdtemp(prefix="weighty-"))))
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, words = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    numbers = torch.Generator().manual_seed(7)
    shapes = {"model.embed_tokens": (words, hidden), "lm_head": (words, hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        for part, shape in {
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{part}"] = shape
    weights = {}
    for part, shape in shapes.items():
        size = 1.0 if "embed" in part else shape[-1] ** -0.5
        drawn = torch.randn(shape, generator=numbers)
        weights[f"{part}.weight"] = 1 + 0.1 * drawn if len(shape) == 1 else size * drawn
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def weighty_hybrid(name: str) -> str:
    """The same of a model with recurrent states, most of which remember for long."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(models.folder(name, Path(tempfile.mkdtemp(prefix="weighty-"))))
    config, numbers = (folder / "config.json").read_text(), torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for part, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=numbers)
            if part.endswith("dt_bias"):
                weight.copy_(drawn - 3)
            elif not part.endswith(("A_log", ".D")):
                size = 1.0 if "embed" in part else weight[0].numel() ** -0.5
                weight.copy_(1 + 0.1 * drawn if weight.dim() == 1 else size * drawn)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)
    return str(folder)


def adapters(model: str, names: str, rank: int = 4) -> dict[str, Any]:
    """vLLM's requests for LoRA adapters of attention in ``model``, a folder of `weighty`, with weights that matter: one
    for each letter of ``names``, with number 1 and so on."""
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    config = json.loads((Path(model) / "config.json").read_text())
    hidden = config["hidden_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    parts = {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden)}
    about = dict(r=rank, lora_alpha=rank, target_modules=[*parts], peft_type="LORA", bias="none", task_type="CAUSAL_LM")
    made = {}
    for number, name in enumerate(names, 1):
        folder, numbers, weights = Path(tempfile.mkdtemp(prefix="adapter-")), torch.Generator().manual_seed(number), {}
        for layer in range(config["num_hidden_layers"]):
            for part, (given, out) in parts.items():
                place = f"base_model.model.model.layers.{layer}.self_attn.{part}"
                weights[f"{place}.lora_A.weight"] = torch.randn(rank, given, generator=numbers) * given**-0.5
                weights[f"{place}.lora_B.weight"] = torch.randn(out, rank, generator=numbers) * 0.3
        save_file(weights, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(about))
        made[name] = LoRARequest(name, number, str(folder))
    return made


def prompt(seed: object, tokens: int = 70) -> list[int]:
    """One that no other seed begins alike."""
    draw = random.Random(f"verified {seed}")
    return [draw.randrange(3, 500) for _ in range(tokens)]


def verify(small: SmallEngine, *names: str) -> list[Verification]:
    """Asks for running requests, and steps the engine until all are answered."""
    (session,) = HOOKS.sessions
    asked = [session.recomputed.ask(name) for name in names]
    while not all(one.done() for one in asked):
        assert small.step(), "nothing runs, and nothing is answered"
    return [answer for one in asked for answer in one.result()]


def compared() -> list[RecomputePair]:
    """All that the worker is sent to compare from now on."""
    (session,) = HOOKS.sessions
    sent: list[RecomputePair] = []
    Patches().follow(session.recomputed, "compare", lambda _, pairs: sent.extend(pairs))
    return sent


def begin(small: SmallEngine, decoded: int, prompts: Mapping[str, Sequence[int]], **more: Any) -> None:
    """Requests by name, all of which have given out so many tokens, and go on."""
    for name, tokens in prompts.items():
        small.submit(name, tokens, 120, **more)
    while any(len(small.answers[name]) < decoded for name in prompts):
        assert small.step()


def finish(small: SmallEngine) -> None:
    """All that runs."""
    while small.step():
        pass


def teach(small: SmallEngine, seed: object = 0, tokens: int = 30) -> None:
    """Fresh requests, prompts of so many tokens, until the noise of the engine is known."""
    (session,) = HOOKS.sessions
    noise = session.recomputed.judge.noise
    for turn in range(40):
        if noise.known:
            return
        names = [f"teach {turn}-{i}" for i in range(3)]
        begin(small, DECODED, {name: prompt(f"{seed} {name}", tokens) for name in names})
        verify(small, *names)
        small.core.abort_requests(names)
        finish(small)
    raise AssertionError("the noise is not known after 80 fresh requests")


def layers(small: SmallEngine) -> list[Any]:
    """vLLM's own layers of attention, in order."""
    every = small.runner.compilation_config.static_forward_context
    return [every[name] for name in sorted(every) if hasattr(every[name], "impl")]


def rescale(layer: Any, put: Callable[[Any, str, Any], object]) -> None:
    """The softmax scale of ``layer`` is 2 % too large in all that is not a graph; the prefills of MLA have it in an
    object for all layers. put: a ``setattr`` that somebody undoes."""
    impl = layer.impl
    for name in ("scale", "softmax_scale"):
        if hasattr(impl, name):
            put(impl, name, getattr(impl, name) * 1.02)
    right = getattr(impl, "forward_mha", None)
    if right is not None:
        put(impl, "forward_mha", lambda q, *rest, **more: right(q * 1.02, *rest, **more))


@contextmanager
def rescaled(small: SmallEngine) -> Iterator[None]:
    """The same of layer 1, for a while."""
    with ExitStack() as undone:
        rescale(layers(small)[1], lambda *change: undone.enter_context(mock.patch.object(*change)))
        yield


def states(small: SmallEngine, request: str, layer: int) -> list[torch.Tensor]:
    """The convolution's and the recurrent state of a request in a ``layer`` of Falcon-H1, by vLLM's own tables. vLLM
    numbers these behind all layers."""
    layer += small.runner.model_config.hf_config.num_hidden_layers
    for number, group in enumerate(small.runner.kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            if type(group.kv_cache_spec).__name__ == "MambaSpec" and f".{layer}." in name:
                bound = small.runner.compilation_config.static_forward_context[name].kv_cache
                return [tensor[small.blocks(request)[number][0]] for tensor in bound]
    raise AssertionError(f"layer {layer} has no states")


def rows(small: SmallEngine, request: str) -> slice:
    """Rows of the tokens that ``request`` computes in a batch; none where it is not in it."""
    names = small.runner.input_batch.req_ids
    if request not in names:
        return slice(0, 0)
    row = names.index(request)
    return slice(*small.runner.query_start_loc.cpu[row : row + 2].tolist())


def decoded(small: SmallEngine, request: str) -> int | None:
    """The row that ``request`` has in a batch in which it decodes."""
    new = rows(small, request)
    return new.start if new.stop - new.start == 1 else None


@contextmanager
def idle_state(small: SmallEngine, layer: int, request: str) -> Iterator[None]:
    """Decodes leave the states of ``request`` in ``layer`` as they were."""
    runner = small.runner

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            if decoded(small, request) is None:
                return forward(*args, **kwargs)
            before = [state.clone() for state in states(small, request, layer)]
            made = forward(*args, **kwargs)
            for state, kept in zip(states(small, request, layer), before, strict=True):
                state.copy_(kept)
            return made

        return wrong

    with _patched(runner.get_model().model.layers[layer].mamba, "forward", make):
        yield


@contextmanager
def scaled(small: SmallEngine, name: str, factor: float) -> Iterator[None]:
    """A weight of the model changes in place, past torch's counters, under a cache that is kept."""
    parameter = dict(small.runner.get_model().named_parameters())[name]
    kept = parameter.data.clone()
    parameter.data.mul_(factor)
    try:
        yield
    finally:
        parameter.data.copy_(kept)


@contextmanager
def scaled_adapter(small: SmallEngine, number: int, layer: int, factor: float) -> Iterator[None]:
    """The adapter's part of o_proj of ``layer`` changes in place where the engine's kernels read it, unknown to all of
    vLLM, under a cache that is kept."""
    slot = small.runner.lora_manager._adapter_manager.lora_index_to_id.index(number)
    (stacked,) = small.runner.get_model().model.layers[layer].self_attn.o_proj.lora_b_stacked
    kept = stacked[slot].clone()
    with torch.inference_mode():
        stacked[slot].mul_(factor)
        try:
            yield
        finally:
            stacked[slot].copy_(kept)


def hit_under_other_weights(small: SmallEngine) -> list[Verification]:
    """A norm's weight changes under a kept cache, once the noise is known. Verdicts on ``hits``, with a prompt served
    before, and on ``fresh``."""
    tokens = prompt("weights")
    teach(small)
    begin(small, 2, {"before": tokens})
    finish(small)
    with scaled(small, "model.layers.0.post_attention_layernorm.weight", 1.05):
        begin(small, 2, {"hits": tokens, "fresh": prompt("fresh")})
        answers = verify(small, "hits", "fresh")
        finish(small)
    return answers


@contextmanager
def shifted_positions(small: SmallEngine, request: str) -> Iterator[None]:
    """The model is given positions one too many for all that ``request`` computes."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            kwargs["positions"] = kwargs["positions"].clone()
            kwargs["positions"][rows(small, request)] += 1
            return forward(*args, **kwargs)

        return wrong

    with _patched(small.runner.get_model(), "forward", make):
        yield


@contextmanager
def short_windows(small: SmallEngine) -> Iterator[None]:
    """In batches of nothing but decodes the windows of all layers are one token short."""
    runner = small.runner

    def make(impl: Any, right: Callable[..., Any]) -> Callable[..., Any]:
        window = impl.sliding_window

        def wrong(*args: Any, **kwargs: Any) -> Any:
            rows = len(runner.input_batch.req_ids)
            decodes = int(runner.query_start_loc.cpu[: rows + 1].diff().max()) == 1
            impl.sliding_window = window - decodes
            try:
                return right(*args, **kwargs)
            finally:
                impl.sliding_window = window

        return wrong

    with ExitStack() as undone:
        for layer in layers(small):
            if layer.sliding_window is not None:
                undone.enter_context(_patched(layer.impl, "forward", partial(make, layer.impl)))
        yield


@contextmanager
def short_decodes(small: SmallEngine, request: str, tokens: int = 1) -> Iterator[None]:
    """Where ``request`` decodes, attention is given so many tokens less than there are."""
    with _short(small, request, lambda new, length: tokens * (new == 1)):
        yield


@contextmanager
def short_later_chunks(small: SmallEngine, request: str) -> Iterator[None]:
    """In chunks of ``request`` behind the first one attention is given one token less than there are."""
    with _short(small, request, lambda new, length: int(1 < new < length)):
        yield


@contextmanager
def _short(small: SmallEngine, request: str, lacks: Callable[[int, int], int]) -> Iterator[None]:
    """lacks: tokens that attention is not given, of the number of new ones and of all."""
    runner = small.runner
    builder = runner.attn_groups[0][0].get_metadata_builder()

    def make(build: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(common_prefix_len: int, common: Any, *args: Any, **kwargs: Any) -> Any:
            names = runner.input_batch.req_ids
            row = names.index(request) if request in names else None
            if row is not None:
                new = int(common.query_start_loc_cpu[row : row + 2].diff())
                common.seq_lens = common.seq_lens.clone()
                common.seq_lens[row] -= lacks(new, int(common.seq_lens[row]))
            return build(common_prefix_len, common, *args, **kwargs)

        return wrong

    with _patched(builder, "build", make):
        yield


@contextmanager
def rounded_decodes(small: SmallEngine) -> Iterator[None]:
    """Layer 0 adds a few roundings to each token that is decoded, as kernels of other shapes do; none to a prompt's."""
    runner = small.runner

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def rounded(*args: Any, **kwargs: Any) -> Any:
            made, batch = forward(*args, **kwargs), runner.input_batch
            rows = len(batch.req_ids)
            decode = batch.num_computed_tokens_cpu[:rows] >= batch.num_prompt_tokens[:rows]
            ends = runner.query_start_loc.cpu[: rows + 1]
            made[: ends[-1]] *= 1 + 4e-7 * torch.tensor(decode).repeat_interleave(ends.diff())[:, None]
            return made

        return rounded

    with _patched(runner.get_model().model.layers[0].mlp, "forward", make):
        yield


@contextmanager
def garbage_in_short_decodes(small: SmallEngine, most: int) -> Iterator[None]:
    """Attention of layer 0 gives garbage in decodes of sequences of ``most`` tokens and less, as that of vLLM 0.26 does
    on a GPU with FlashAttention 3, CUDA graphs and one window in all layers."""
    runner = small.runner

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            made, rows = forward(*args, **kwargs), len(runner.input_batch.req_ids)
            new = runner.query_start_loc.cpu[: rows + 1].diff()
            if int(new.max()) == 1 and runner.input_batch.num_computed_tokens_cpu[:rows].max() < most:
                made.normal_(0, 8)
            return made

        return wrong

    with _patched(runner.get_model().model.layers[0].self_attn, "forward", make):
        yield


@contextmanager
def noisy_head(small: SmallEngine, request: str) -> Iterator[None]:
    """Where ``request`` decodes, the output of one head of layer 0 has 5 % of noise in it."""
    attention, numbers = small.runner.get_model().model.layers[0].self_attn.attn, torch.Generator().manual_seed(3)

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            made, row = forward(*args, **kwargs), decoded(small, request)
            if row is not None:
                head = made[row].view(attention.num_heads, -1)[0]
                noise = torch.randn(head.shape, generator=numbers).to(head.dtype)
                head += 0.05 * head.norm() / noise.norm() * noise
            return made

        return wrong

    with _patched(attention, "forward", make):
        yield


@contextmanager
def skipped_layer(small: SmallEngine, layer: int, request: str) -> Iterator[None]:
    """``layer`` adds nothing to what comes in, for the tokens of ``request``."""
    block = small.runner.get_model().model.layers[layer]

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            made = forward(*args, **kwargs)
            made[rows(small, request)] = 0
            return made

        return wrong

    with _patched(block.self_attn, "forward", make), _patched(block.mlp, "forward", make):
        yield


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    patches = Patches()
    patches.wrap(owner, name, make)
    try:
        with torch.inference_mode():
            yield
    finally:
        patches.undo()
