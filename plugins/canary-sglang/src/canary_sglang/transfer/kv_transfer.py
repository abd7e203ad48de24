"""Common code of HiCache and PD disaggregation."""

import torch
from torch import Tensor

from canary_core import Canary


def plain_names(canary: Canary) -> dict[str, str]:
    """Full names of the regions by their names without the model, e.g. ``full`` → ``draft/full``."""
    return {name.rpartition("/")[2]: name for name in canary.regions}


def used_here(*tensors: Tensor) -> None:
    """To be called before the current stream reads tensors made on another stream: their memory must not be reused
    earlier."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
