"""`attention_rule`: attention of one layer by Hugging Face's configuration of a model, whatever engine computes it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from canary_adapters.layer_numbers import layer_numbers
from canary_core import AttentionRule

FULL = frozenset({"granite", "llama", "olmo2"})
WINDOWED = frozenset({"mistral", "mixtral", "qwen3_moe"})
BY_LAYER = frozenset({"gemma2", "gemma3_text", "gpt_oss", "qwen2", "qwen2_moe", "qwen3", "smollm3"})
COMPRESSED = frozenset({"deepseek_v2", "deepseek_v3"})
ATTENTION_TYPES = FULL | WINDOWED | BY_LAYER | COMPRESSED
"""Types of models whose attention is said by the fields of the configuration that are read here: without a window
whatever fields there are, with one in each layer, by the type of the layer, or MLA without one."""
YARN = frozenset({"yarn", "deepseek_yarn"})
"""Types of rotation with one factor in the scale of MLA, the same in all engines; vLLM and SGLang rename the first."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """One layer of an engine. region: the one with its KV. owner: the object that computes attention. rule: the reason
    where none is known. compressed: of a type of model with MLA."""

    region: str
    owner: Any
    rule: AttentionRule | str
    compressed: bool = False


def attention_layers(
    config: Any,
    parameters: Iterable[tuple[str, Tensor]],
    owners: Mapping[str, Any],
    regions: Mapping[str, Sequence[str]],
) -> dict[int, AttentionLayer]:
    """By number. ``config``: as of `attention_rule`. ``parameters``: of the model, with their names. ``owners``: by the
    layer's name. ``regions``: names of the layers of each."""
    sinks = {name: parameter for name, parameter in parameters if name.endswith(".sinks")}
    own = {number: sinks[name] for name, number in layer_numbers([*sinks]).items()}
    compressed = config.model_type in COMPRESSED
    return {
        number: AttentionLayer(region, owners[name], attention_rule(config, number, own.get(number)), compressed)
        for region, names in regions.items()
        for name, number in layer_numbers(names).items()
    }


def attention_rule(
    config: Any, layer: int, sinks: Tensor | None = None, stray_windows: bool = False
) -> AttentionRule | str:
    """The rule of a ``layer``, or the reason for which none is known. ``config``: of the text model. ``sinks``: the
    layer's, of the heads that the process has. ``stray_windows``: whether the engine is known to pass over the window
    of a configuration whose type of model has none."""
    known = config.model_type in ATTENTION_TYPES and not getattr(config, "use_bidirectional_attention", None)
    window = _window(config, layer) if known else 0
    if window == 0:
        return f"nobody has written down what attention of a {config.model_type} is"
    if config.model_type in COMPRESSED:
        return _compressed(config)
    if config.model_type in FULL and getattr(config, "sliding_window", None) and not stray_windows:
        return f"its configuration names a window, and a {config.model_type} has none"
    if config.model_type == "gpt_oss" and sinks is None:
        return "its sinks are not where they are looked for"
    cap = getattr(config, "attn_logit_softcapping", None)
    return AttentionRule(_scale(config), window, cap, None if sinks is None else sinks.detach())


def _compressed(config: Any) -> AttentionRule | str:
    """Of MLA, without the indexer of later types: DeepSeek-V2's scale, with the square of YaRN's factor."""
    if getattr(config, "index_topk", None):
        return "its attention reads the tokens that an indexer chooses"
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rotation.get("rope_type") or rotation.get("type") or "default"
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    if kind == "default":
        return AttentionRule(scale)
    said = {name: rotation.get(name) for name in ("apply_yarn_scaling", "apply_scale", "attention_factor")}
    if (
        kind not in YARN
        or said["attention_factor"] == 1.0
        or False in (said["apply_yarn_scaling"], said["apply_scale"])
    ):
        return f"engines read its rotation in several ways ({kind}, {said})"
    factor = float(rotation.get("factor") or 1.0)
    more = 0.1 * float(rotation.get("mscale_all_dim") or 0.0) * math.log(factor) if factor > 1 else 0.0
    return AttentionRule(scale * (1.0 + more) ** 2)


def _scale(config: Any) -> float:
    if getattr(config, "attention_multiplier", None):
        return float(config.attention_multiplier)
    if getattr(config, "query_pre_attn_scalar", None):
        return float(config.query_pre_attn_scalar**-0.5)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(dim**-0.5)


def _window(config: Any, layer: int) -> int | None:
    """None for none, 0 where it is not known."""
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if config.model_type in BY_LAYER:
        return {"full_attention": None, "sliding_attention": window or 0}.get(config.layer_types[layer], 0)
    if config.model_type in FULL:
        window = None
    # Others read no types of layers: an engine might.
    return 0 if types and {*types} != {"full_attention" if window is None else "sliding_attention"} else window
