"""Speculative decoding with tiny random models."""

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


def allow_on_a_cpu() -> None:
    """SGLang's tree kernels for a CPU are in a package that isn't on PyPI for one; those in Triton, which it has for
    another device, run in the interpreter."""
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.speculative import eagle_utils

    eagle_utils._is_xpu = cache_locs._is_xpu = True


def let_agree(target: torch.nn.Module, draft: torch.nn.Module | None) -> None:
    """Makes what both models say depend mostly on the last token, and on that alike: so some proposals are accepted and
    some are not. Random models never agree."""
    if draft is None:
        return
    with torch.no_grad():
        for name, weight in [*target.named_parameters(), *draft.named_parameters()]:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(0, 1e-4)
            elif name.endswith("model.fc.weight"):
                weight.zero_()
                weight[:, : weight.shape[0]].fill_diagonal_(1.0)
