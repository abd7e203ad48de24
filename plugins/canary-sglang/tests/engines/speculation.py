"""Speculative decoding with tiny random models."""

import importlib
from typing import Any

import torch


def draft_model(scheduler: Any) -> torch.nn.Module | None:
    """The model that speculates, if there is one; workers wrap each other."""
    worker = getattr(scheduler, "draft_worker", None)
    for _ in range(3):
        runner = getattr(worker, "draft_runner", None) or getattr(worker, "draft_model_runner", None)
        if runner is not None:
            model: torch.nn.Module = runner.model
            return model
        worker = getattr(worker, "draft_worker", None)
    return None


def allow_on_a_cpu(algorithm: str) -> None:
    """SGLang's tree kernels for a CPU are in a package that isn't on PyPI for one; those in Triton, which it has for
    another device, run in the interpreter."""
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.speculative import eagle_utils

    eagle_utils._is_xpu = cache_locs._is_xpu = True
    _take_a_number()
    _overlap()
    if algorithm == "NGRAM":
        from sglang.srt import utils

        usual, utils.is_xpu = utils.is_xpu, lambda: True
        importlib.import_module("sglang.srt.speculative.ngram_worker")
        utils.is_xpu = usual


def _overlap() -> None:
    """SGLang turns the overlap scheduler off for speculation on a CPU, where nothing would be gained. Memory of a CPU
    waits for no stream, and torch has no way to say so."""
    module = importlib.import_module("sglang.srt.arg_groups.speculative_hook")
    module._disable_overlap_schedule_for_cpu = lambda server_args: None
    usual = torch.Tensor.record_stream

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if tensor.is_cuda:
            usual(tensor, stream)

    torch.Tensor.record_stream = record_stream


def _take_a_number() -> None:
    """Multi-layer EAGLE tells each draft model which layer it is. The models that it was made for are large; LLaMA's
    has but one layer and doesn't ask."""
    from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle

    usual = LlamaForCausalLMEagle.__init__

    def init(self: Any, *args: Any, draft_model_idx: int | None = None, **kwargs: Any) -> None:
        usual(self, *args, **kwargs)

    LlamaForCausalLMEagle.__init__ = init


def let_agree(target: torch.nn.Module, draft: torch.nn.Module | None) -> None:
    """Makes what both models say depend mostly on the last token, and on that nearly alike: so some proposals are
    accepted and some are not. Random models never agree, nor do they repeat themselves."""
    said, says = dict(target.named_parameters()), {} if draft is None else dict(draft.named_parameters())
    embedding = "model.embed_tokens.weight"
    with torch.no_grad():
        for name, weight in says.items() if says.get(embedding) is not said[embedding] else ():
            # The draft model has embeddings of its own.
            if name in (embedding, "lm_head.weight"):
                weight.copy_(said[name] + 0.02 * torch.randn_like(weight))
            elif weight.dim() == 1:
                weight.fill_(1.0)
        for name, weight in [*said.items(), *says.items()]:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(0, 1e-4)
            elif name.endswith("model.fc.weight"):
                weight.normal_(0, 0.005)
                weight[:, : weight.shape[0]].fill_diagonal_(1.0)
