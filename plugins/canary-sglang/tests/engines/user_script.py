"""``sglang.Engine`` with its processes and the overlap scheduler, as a user starts it: prints outputs as JSON.

``python -m engines.user_script FOLDER [cpu | cuda | OPTIONS]``: with ``cuda`` a larger model on a GPU, with CUDA
graphs; ``OPTIONS`` are more `ServerArgs` on a CPU, as a JSON object.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from engines.gpu_models import GPU_DEFAULTS, GPU_MODELS


def on_cpu() -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's configuration and `ServerArgs`."""
    config: dict[str, Any] = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=256, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", bos_token_id=1, eos_token_id=2, dtype="bfloat16",
    )  # fmt: skip
    options: dict[str, Any] = dict(
        load_format="dummy", skip_tokenizer_init=True, device="cpu", attention_backend="torch_native",
        grammar_backend="none", disable_cuda_graph=True, random_seed=0, max_total_tokens=512, max_running_requests=4,
        chunked_prefill_size=64, mem_fraction_static=0.5, log_level="warning",
    )  # fmt: skip
    return config, options


def main() -> None:
    """See above."""
    import sglang

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    config, options = (GPU_MODELS["gpu_llama"], GPU_DEFAULTS) if wanted == "cuda" else on_cpu()
    more = json.loads(wanted) if wanted.startswith("{") else {}
    folder.joinpath("config.json").write_text(json.dumps(config))
    engine = sglang.Engine(model_path=str(folder), **{**options, "disable_overlap_schedule": False, **more})
    r = random.Random(0)
    shared = [r.randrange(3, 250) for _ in range(30)]
    outputs = []
    for _ in range(3):
        prompts = [shared[: r.randrange(1, 30)] + [r.randrange(3, 250) for _ in range(10)] for _ in range(10)]
        sampling = dict(max_new_tokens=12, temperature=0.0, ignore_eos=True)
        outputs += [o["output_ids"] for o in engine.generate(input_ids=prompts, sampling_params=sampling)]
    sys.stdout.write("OUTPUTS " + json.dumps(outputs) + "\n")
    sys.stdout.flush()
    engine.shutdown()


if __name__ == "__main__":
    main()
