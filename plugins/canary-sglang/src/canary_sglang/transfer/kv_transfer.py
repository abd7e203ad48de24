"""What the two ways share by which KV reaches the pool without a forward: HiCache and PD disaggregation."""

import torch
from torch import Tensor

from canary_core import Canary


def plain_names(canary: Canary) -> dict[str, str]:
    """Regions' names without the model's, e.g. ``full`` → ``draft/full``."""
    return {name.rpartition("/")[2]: name for name in canary.regions}


def used_here(*tensors: Tensor) -> None:
    """The current stream reads tensors that were made on another one: their memory must not be reused before."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
