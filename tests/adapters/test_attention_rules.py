"""Rules of attention by a configuration: where engines may read it in two ways, there is none."""

import math
from types import SimpleNamespace

import pytest
import torch

from canary_adapters import attention_layers, attention_rule

FULL, SLIDING = "full_attention", "sliding_attention"


def config(kind, **more):
    """As Hugging Face's."""
    return SimpleNamespace(model_type=kind, hidden_size=64, num_attention_heads=4, **more)


@pytest.mark.parametrize(
    ("given", "window"),
    [
        (config("llama"), None),
        (config("mistral", sliding_window=24), 24),
        (config("mistral", sliding_window=None), None),
        (config("mistral", sliding_window=24, layer_types=[SLIDING] * 2), 24),
        (config("qwen3", sliding_window=24, layer_types=[FULL, SLIDING]), 24),
        (config("qwen3", sliding_window=24, layer_types=[SLIDING, FULL]), None),
    ],
)
def test_windows_are_those_of_the_type(given, window):
    """In the second layer."""
    rule = attention_rule(given, 1)
    assert (rule.scale, rule.window_tokens, rule.soft_cap) == (0.25, window, None)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (config("unheard_of"), "nobody has written down what attention of a unheard_of is"),
        (config("llama", sliding_window=24), "its configuration names a window, and a llama has none"),
        (config("llama", layer_types=[FULL, SLIDING]), "nobody has written down"),
        (config("mistral", sliding_window=24, layer_types=[FULL, SLIDING]), "nobody has written down"),
        (config("qwen3", sliding_window=None, layer_types=[FULL, SLIDING]), "nobody has written down"),
        (config("qwen3", sliding_window=24, layer_types=[FULL, "chunked_attention"]), "nobody has written down"),
        (config("gemma3_text", use_bidirectional_attention=True, layer_types=[FULL] * 2), "nobody has written down"),
        (config("gpt_oss", sliding_window=24, layer_types=[FULL, SLIDING]), "its sinks are not"),
    ],
)
def test_a_configuration_in_doubt_has_a_reason(given, reason):
    """Rather than a wrong alarm."""
    assert reason in attention_rule(given, 1)


MLA = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 9}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 0.5}


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ({}, 0.2),
        ({"rope_parameters": {"rope_type": "default", "mscale_all_dim": 1.0}}, 0.2),
        ({"rope_scaling": {"rope_type": "deepseek_yarn", "rope_theta": 1.0}}, 0.2),
        ({"rope_parameters": {**YARN, "mscale_all_dim": 0}}, 0.2),
        ({"rope_parameters": YARN}, 0.2 * (1 + 0.05 * math.log(4)) ** 2),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 0.5}}, 0.2 * (1 + 0.05 * math.log(4)) ** 2),
    ],
)
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_the_scale_of_mla_has_the_factor_of_its_rotation(kind, more, scale):
    """Squared, in all forms that engines make of the configuration."""
    rule = attention_rule(config(kind, **MLA, **more), 1)
    assert rule.scale == pytest.approx(scale, rel=1e-12)
    assert (rule.window_tokens, rule.soft_cap, rule.sinks) == (None, None, None)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"index_topk": 64}, "that an indexer chooses"),
        ({"rope_parameters": {**YARN, "rope_type": "linear"}}, "in several ways (linear"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.0}}, "in several ways"),
        ({"rope_parameters": {**YARN, "apply_yarn_scaling": False}}, "in several ways"),
    ],
)
def test_mla_that_engines_read_in_two_ways_has_a_reason(more, reason):
    """The indexer of DeepSeek-V3.2, and rotations under which vLLM, SGLang and Transformers have other scales."""
    assert reason in attention_rule(config("deepseek_v3", **MLA, **more), 1)


def test_an_engine_that_passes_over_stray_windows_says_so():
    """As Transformers does."""
    assert attention_rule(config("llama", sliding_window=24), 1, stray_windows=True).window_tokens is None


def test_layers_have_their_own_sinks_and_regions():
    """By the numbers in their names."""
    names = {"full": ["model.layers.0.attn.attn"], "window": ["model.layers.1.attn.attn"]}
    owners = {name: object() for some in names.values() for name in some}
    sinks = {f"model.layers.{i}.attn.sinks": torch.full((4,), float(i)) for i in range(2)}
    given = config("gpt_oss", sliding_window=24, layer_types=[FULL, SLIDING])
    found = attention_layers(given, sinks.items(), owners, names)
    assert {number: layer.region for number, layer in found.items()} == {0: "full", 1: "window"}
    assert [found[i].rule.sinks[0].item() for i in range(2)] == [0.0, 1.0]
    assert found[1].owner is owners["model.layers.1.attn.attn"]
