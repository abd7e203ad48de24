"""Lists of small integers to the device, without waiting for it."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from canary_adapters import number_array, upload


def upload_lists(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each list as int64 tensor on ``device``, all in one copy."""
    everything = array("q")
    for values in lists:
        everything += number_array(values, "q")
    return list(upload(everything, device).split([len(values) for values in lists]))
