"""`Projection`: the layer of MLA that computes keys and values from compressed KV, and what it gave last."""

from typing import Any

import torch
from torch import Tensor


class Projection:
    """A forward hook of ``kv_b_proj``: of the last call, its input and output, ``[tokens, dim]`` each."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, module: Any, given: tuple[Tensor, ...], output: Any) -> None:
        """Engines of several ranks give a bias, too."""
        made = output[0] if isinstance(output, tuple) else output
        self._last = given[0].reshape(-1, given[0].shape[-1]), made.reshape(-1, made.shape[-1])

    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Input of the last call, and ``keys`` and ``values``, ``[tokens, heads, dim]``, as its output has them. Of keys
        the rotated part, common to all heads, is not in it and the first head's. None without a call since the last
        time, or after one of other sizes."""
        last, self._last = self._last, None
        if last is None or len(last[1]) < len(keys):
            return None
        given, made = (tensor[len(tensor) - len(keys) :] for tensor in last)
        heads, plain = keys.shape[1], made.shape[1] // keys.shape[1] - values.shape[2]
        if made.shape[1] % heads or not 0 <= plain <= keys.shape[2]:
            return None
        parts = made.view(len(keys), heads, -1)
        rotated = keys[:, :1, plain:].expand(-1, heads, -1)
        return given, torch.cat((parts[..., :plain], rotated), -1), parts[..., plain:]
