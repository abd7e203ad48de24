"""Configurations of tiny hybrid models, which keep recurrent states beside the KV, and what SGLang needs to run them
where there is no GPU."""

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

LFM2 = dict(
    architectures=["Lfm2ForCausalLM"], model_type="lfm2", vocab_size=256, hidden_size=64, intermediate_size=128,
    block_ff_dim=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    norm_eps=1e-5, rope_theta=10000.0, conv_bias=False, conv_L_cache=3,
    layer_types=["conv", "full_attention", "conv", "conv"], bos_token_id=1, eos_token_id=2, pad_token_id=0,
    dtype="bfloat16", tie_word_embeddings=True,
)  # fmt: skip
FALCON_H1 = dict(
    architectures=["FalconH1ForCausalLM"], model_type="falcon_h1", vocab_size=256, hidden_size=64,
    intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10000.0, mamba_d_ssm=32, mamba_n_heads=2,
    mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_d_conv=4, mamba_expand=1, mamba_chunk_size=32,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16", tie_word_embeddings=False,
)  # fmt: skip
QWEN3_5 = dict(
    architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", vocab_size=256, hidden_size=64,
    intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", partial_rotary_factor=0.5,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0), full_attention_interval=2,
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=1,
    linear_num_value_heads=2, bos_token_id=1, eos_token_id=2, dtype="bfloat16", tie_word_embeddings=True,
)  # fmt: skip
KIMI_LINEAR = dict(
    architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", vocab_size=256, hidden_size=64,
    intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", max_position_embeddings=512, kv_lora_rank=256,
    q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=16, mla_use_nope=True,
    first_k_dense_replace=3, moe_layer_freq=1, num_experts=4, num_experts_per_token=2, num_shared_experts=1,
    moe_intermediate_size=32, moe_renormalize=True, moe_router_activation_func="sigmoid", routed_scaling_factor=1.0,
    num_expert_group=1, topk_group=1, use_grouped_topk=True,
    linear_attn_config=dict(
        kda_layers=[1, 3], full_attn_layers=[2], num_heads=2, head_dim=16, short_conv_kernel_size=4
    ),
    bos_token_id=1, eos_token_id=2, dtype="float32", tie_word_embeddings=False,
)  # fmt: skip
HYBRID_MODELS = {"lfm2": LFM2, "falcon_h1": FALCON_H1, "qwen3_5": QWEN3_5, "kimi_linear": KIMI_LINEAR}


def run_on_cpu(model: str, options: dict[str, Any]) -> None:
    """What SGLang needs before an engine of this model is made where there is no GPU."""
    prepare = _ON_CPU.get(model)
    if prepare is not None:
        prepare()
    if str(options.get("mamba_radix_cache_strategy", "")).startswith("extra_buffer"):
        _checkpoints_on_cpu()


def _mamba2() -> None:
    """SGLang's Mamba-2 layers are Triton kernels, which the interpreter runs; only their names are bound on GPUs alone,
    and one of them asks torch for the current GPU."""
    from sglang.kernels.ops.mamba import causal_conv1d_triton
    from sglang.srt.layers.attention.mamba import causal_conv1d, mamba

    torch.cpu.device = lambda index: contextlib.nullcontext()
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        setattr(mamba, name, getattr(causal_conv1d, name))
        setattr(mamba, f"{name}_triton", getattr(causal_conv1d_triton, name))
    _untuned()


def _linear_attention() -> None:
    """SGLang's kernels of linear attention are flash-linear-attention's, in Triton, which the interpreter runs. It
    replaces what it finds in Triton's own modules, so functions that were taken out of them have to be looked up there
    again; there is nothing to tune and no device to ask about its size."""
    import triton.language as tl
    from sglang.kernels.ops.attention.fla import op

    torch.cpu.device = lambda index: contextlib.nullcontext()
    loaded = [module for name, module in sys.modules.items() if name.startswith(f"{op.__package__}.")]
    for name in ("exp", "exp2", "log", "log2"):
        taken = getattr(op, name)
        for module in loaded:
            if getattr(module, name, None) is taken:
                setattr(module, name, lambda x, name=name: getattr(tl, name)(x))
    _untuned()
    _bfloat16_products()
    from sglang.kernels.ops.attention.fla import layernorm_gated

    layernorm_gated._get_sm_count = lambda device: 1


def _untuned() -> None:
    """Kernels with several configurations take the first one: the interpreter has nothing to tune."""
    from triton.runtime.autotuner import Autotuner

    tuned = Autotuner.run

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return tuned(self, *args, **kwargs)

    Autotuner.run = run_first


def _bfloat16_products() -> None:
    """Triton's interpreter keeps bfloat16 as integers of 16 bits and multiplies matrices of them as such; KDA's do."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def as_float32(tensor: Any) -> Any:
        if tensor.dtype.scalar != tl.bfloat16:
            return tensor
        return TensorHandle((tensor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, as_float32(a), as_float32(b), *rest)

    InterpreterBuilder.create_dot = dot


def _checkpoints_on_cpu() -> None:
    """SGLang takes checkpoints of states inside of a forward only on the devices that it has listed, and pins what it
    copies to them."""
    try:
        from sglang.srt.arg_groups import mamba_hook
    except ImportError:
        from sglang.srt import server_args

        validate = server_args.ServerArgs._validate_mamba_extra_buffer
        there = validate.__globals__

        def as_if_on_a_gpu(self: Any, *args: Any) -> None:
            is_cuda, there["is_cuda"] = there["is_cuda"], lambda: True
            try:
                validate(self, *args)
            finally:
                there["is_cuda"] = is_cuda

        server_args.ServerArgs._validate_mamba_extra_buffer = as_if_on_a_gpu
    else:
        mamba_hook.get_platform = lambda: SimpleNamespace(is_cuda=True, is_sm100=False, has_flashinfer=False)
    tensor = torch.tensor
    torch.Tensor.pin_memory = lambda self, *args: self
    torch.tensor = lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs)


_ON_CPU: dict[str, Callable[[], None]] = {
    "falcon_h1": _mamba2,
    "qwen3_5": _linear_attention,
    "kimi_linear": _linear_attention,
}
