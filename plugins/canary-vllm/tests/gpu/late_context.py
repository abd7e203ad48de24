"""A later chunk of a prompt in a real vLLM with compressed KV on a GPU, beside a prompt that begins in the same step:
is its attention over all tokens before it?

    python3 late_context.py

Canary is no part of it. Prints a line for each prefill of a step in which some prompt goes on: how many tokens it has,
and behind how many; and how far the output of layer 0 is from attention over all of them, and over the new ones alone.
"""

import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[4] / "tests")]

import torch  # noqa: E402


def attention(impl: Any, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Causal attention of ``q``, ``[new, heads, size]``, over compressed KV, ``[tokens, numbers]``, whose last ones are
    the new ones; in 32 bits."""
    latents, rotated = rows.split([impl.kv_lora_rank, rows.shape[1] - impl.kv_lora_rank], -1)
    projected = impl.kv_b_proj(latents.contiguous())[0].view(len(rows), impl.num_heads, -1)
    keys, values = projected.split([impl.qk_nope_head_dim, impl.v_head_dim], -1)
    keys = torch.cat([keys, rotated[:, None].expand(-1, impl.num_heads, -1)], -1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * impl.scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(rows) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values.float())


def far(got: torch.Tensor, want: torch.Tensor) -> str:
    """Relative L2 error."""
    return f"{float((got.float() - want).norm() / want.norm()):.2g}"


def watch(impl: Any) -> None:
    """Prints lines of each step of this layer."""
    right = impl.forward_mha

    def forward(q: Any, latents: Any, rotated: Any, cache: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        made = right(q, latents, rotated, cache, metadata, *rest, **named)
        prefill, output = metadata.prefill, named["output"]
        if prefill.chunked_context is None:
            return made
        starts, behind = prefill.query_start_loc.tolist(), prefill.chunked_context.seq_lens.sum(0).tolist()
        new = torch.cat([latents, rotated.reshape(len(latents), -1)], 1)
        heads = output.view(-1, impl.num_heads, impl.v_head_dim)
        for number, before in enumerate(behind):
            of = slice(starts[number], starts[number + 1])
            places = torch.arange(before, device=q.device)
            blocks = prefill.block_table[number][places // cache.shape[1]].long()
            every = torch.cat([cache[blocks, places % cache.shape[1]], new[of]])
            alone, whole = attention(impl, q[of], new[of]), attention(impl, q[of], every)
            told = f"{far(heads[of], whole)} from all, {far(heads[of], alone)} from the new ones"
            print(f"{of.stop - of.start:4} tokens behind {before:4}: {told}", flush=True)
        print(flush=True)
        return made

    impl.forward_mha = forward


def main() -> None:
    """Prompts of 160 tokens, with 256 tokens a step."""
    import recompute
    from vllm_on_cpu import verified
    from vllm_on_cpu.attention_types import checkpoint
    from vllm_on_cpu.engine import SmallEngine

    kind, more, options = recompute.SETUPS["expanded"]
    options = {**recompute.OPTIONS, **recompute.GRAPHS, **options, "max_num_batched_tokens": 256}
    small = SmallEngine(checkpoint(kind, **{**recompute.SIZES, **more}), **options)
    watch(verified.layers(small)[0].impl)
    draw = random.Random(1)
    with torch.inference_mode():
        for number in range(5):
            small.submit(f"{number}", [draw.randrange(3, 500) for _ in range(160)], 4)
        while small.step():
            pass


if __name__ == "__main__":
    main()
