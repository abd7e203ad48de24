"""Lists of small integers to the device, without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from canary_adapters import upload


def upload_lists(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each list as int64 tensor on ``device``, all in one copy."""
    everything = upload([value for values in lists for value in values], device)
    return list(everything.split([len(values) for values in lists]))
