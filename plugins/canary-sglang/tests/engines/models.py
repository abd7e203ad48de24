"""All models that the tests' engines have."""

import json
from pathlib import Path

import torch

from engines.attention_models import ATTENTION_MODELS
from engines.cpu_models import CPU_MODELS
from engines.gpu_models import GPU_MODELS
from engines.hybrid_models import HYBRID_MODELS

MODELS = {**CPU_MODELS, **HYBRID_MODELS, **GPU_MODELS, **ATTENTION_MODELS}


def write_model(folder: Path, model: str) -> str:
    """Writes the configuration of one of `MODELS` to ``folder``; gives the path."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("config.json").write_text(json.dumps(MODELS[model]))
    return str(folder)


def randomize(model: torch.nn.Module) -> None:
    """Weights with which outputs depend on the whole prompt; SGLang's dummy weights say the same token for ever. They
    are changed in place, so graphs that were captured before see them. Of a quantised model only the embeddings: other
    weights have scales and were rearranged for their kernels."""
    torch.manual_seed(0)
    quantised = getattr(model, "quant_config", None) is not None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if quantised and not any(part in name for part in ("embed_tokens", "lm_head")):
                continue
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
            else:
                weight.fill_(1.0 if "norm" in name else 0.0)
        if not quantised and hasattr(model, "post_load_weights"):
            _derive_again(model)


def _derive_again(model: torch.nn.Module) -> None:
    """Anew and in place: the halves of ``kv_b_proj`` by which MLA decodes. SGLang copies them out of it once."""
    derived = {
        (module, name): value
        for module in model.modules()
        for name in ("w_kc", "w_vc")
        if torch.is_tensor(value := getattr(module, name, None))
    }
    model.post_load_weights()
    for (module, name), value in derived.items():
        value.copy_(getattr(module, name))
        setattr(module, name, value)
