"""Guard Transformers: two lines around a model that serves requests with continuous batching.

    pip install canary-core canary-transformers transformers
    python examples/guard_transformers.py

The model is tiny and random, so nothing is downloaded.
"""

import canary_transformers
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
prompts = [[*range(3, 40), 60 + i] for i in range(4)]  # a shared prefix

with canary_transformers.guard(model, read_check=-1) as guard:
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=64),
    )
    stats = guard.stats()

print(len(outputs), "requests,", stats["checked_slots"], "slots checked,", stats["violations"], "findings")
