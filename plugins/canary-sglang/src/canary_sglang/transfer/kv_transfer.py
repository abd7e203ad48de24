"""What the two ways share by which KV reaches the pool without a forward: HiCache and PD disaggregation."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.canary import Canary
from canary_core.errors import PluginError


def plain_names(canary: Canary) -> dict[str, str]:
    """Regions' names without the model's, e.g. ``full`` → ``draft/full``."""
    return {name.rpartition("/")[2]: name for name in canary.regions}


def used_here(*tensors: Tensor) -> None:
    """The current stream reads tensors that were made on another one: their memory must not be reused before."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
