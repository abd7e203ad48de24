"""Configurations of tiny hybrid models, which keep recurrent states beside the KV."""

import contextlib

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
    max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10000.0, mamba_d_ssm=64, mamba_n_heads=4,
    mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_d_conv=4, mamba_expand=1, mamba_chunk_size=32,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16", tie_word_embeddings=False,
)  # fmt: skip
HYBRID_MODELS = {"lfm2": LFM2, "falcon_h1": FALCON_H1}


def mamba2_on_cpu() -> None:
    """SGLang's Mamba-2 layers are Triton kernels, which the interpreter runs; only their names are bound on GPUs alone,
    and one of them asks torch for the current GPU."""
    from sglang.kernels.ops.mamba import causal_conv1d_triton
    from sglang.srt.layers.attention.mamba import causal_conv1d, mamba

    torch.cpu.device = lambda index: contextlib.nullcontext()
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        setattr(mamba, name, getattr(causal_conv1d, name))
        setattr(mamba, f"{name}_triton", getattr(causal_conv1d_triton, name))
