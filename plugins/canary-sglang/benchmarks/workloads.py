"""The engines and the traffic that are measured."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """``batch`` requests of ``prompt_tokens`` random tokens at once, all new, that give ``new_tokens`` each; measured
    ``repeats`` times in a row."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    repeats: int

    def __str__(self) -> str:
        return f"{self.batch} x ({self.prompt_tokens} in, {self.new_tokens} out)"


@dataclass(frozen=True)
class Config:
    """One engine: its `ServerArgs` beside the common ones, and its environment."""

    options: dict[str, Any]
    environment: dict[str, str]
    title: str


WORKLOADS = (Workload("batch", 64, 1024, 256, 1), Workload("prompt", 1, 8000, 1, 3))
SMALL = (Workload("batch", 3, 48, 8, 1), Workload("prompt", 1, 150, 1, 3))
"""For a CPU, to see that everything runs."""

CONFIGS = {
    "ours": Config({}, {"CANARY_PLUGINS": "sglang,overhead_switch"}, "canary-sglang"),
    "off": Config({}, {}, "no canary"),
    "builtin": Config({"kv_canary": "log", "kv_canary_real_data": "none"}, {}, "SGLang's own, no bytes"),
    "builtin-all": Config({"kv_canary": "log", "kv_canary_real_data": "all"}, {}, "SGLang's own, layer 0's K"),
}
ON, OFF = "on", "off"

_SIZES = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=128256,
)  # fmt: skip
_TINY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=512,
)  # fmt: skip


MODELS = ("llama", "window")
"""Llama, and Cohere2, of whose layers three of four see the last 4096 tokens only, from a pool of their own."""


def model_config(model: str, tiny: bool) -> dict[str, Any]:
    """One of `MODELS` in Llama-8B's shape, or in one that a CPU can serve."""
    sizes = _TINY if tiny else _SIZES
    known = dict(
        max_position_embeddings=32768, rope_theta=500000.0, hidden_act="silu", tie_word_embeddings=False,
        torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, **sizes,
    )  # fmt: skip
    if model == "llama":
        return known | dict(architectures=["LlamaForCausalLM"], model_type="llama", rms_norm_eps=1e-5)
    sliding = [int((layer + 1) % 4 > 0) for layer in range(sizes["num_hidden_layers"])]
    if tiny:
        sliding[-1] = 0
    return known | dict(
        architectures=["Cohere2ForCausalLM"], model_type="cohere2", sliding_window=32 if tiny else 4096,
        layer_types=["sliding_attention" if slides else "full_attention" for slides in sliding],
        sliding_window_pattern=4, layer_norm_eps=1e-5, logit_scale=1.0, pad_token_id=0, tie_word_embeddings=True,
        is_hybrid_swa=True, hybrid_layer_pattern=sliding,
    )  # fmt: skip


def server_args(on_cpu: bool) -> dict[str, Any]:
    """What all engines have in common. A prompt of 8000 tokens is one chunk."""
    options = dict(
        load_format="dummy", skip_tokenizer_init=True, grammar_backend="none", log_level="error", random_seed=1,
        chunked_prefill_size=8192,
    )  # fmt: skip
    if on_cpu:
        return options | dict(
            device="cpu", attention_backend="torch_native", disable_cuda_graph=True, max_total_tokens=1024,
            mem_fraction_static=0.05,
        )  # fmt: skip
    return options | dict(
        attention_backend="triton", sampling_backend="pytorch", mem_fraction_static=0.6, cuda_graph_max_bs_decode=128,
        cuda_graph_backend_prefill="disabled",
    )  # fmt: skip
