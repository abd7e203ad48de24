"""`Projection`: keys and values of MLA, as computed from compressed KV by a layer's projection."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Expanded(NamedTuple):
    """Keys and values ``[tokens, heads, dim]``. rows: the source of both, ``[tokens, dim]``: compressed KV with the
    rotated part of keys behind, as in a pool."""

    rows: Tensor
    keys: Tensor
    values: Tensor


class Projection:
    """A forward hook of ``kv_b_proj``, for one forward of the model at a time."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, module: Any, given: tuple[Tensor, ...], output: Any) -> None:
        """Keeps input and output. Engines that have ranks give a bias, too."""
        made = output[0] if isinstance(output, tuple) else output
        self._last = given[0].reshape(-1, given[0].shape[-1]), made.reshape(-1, made.shape[-1])

    def take(self, keys: Tensor, values: Tensor) -> Expanded | None:
        """The last call's, of the tokens of ``keys`` and ``values``, which attention is given. The rotated part, common
        to all heads, is that of the first one's key. None without a call since the last time, or after one of other
        sizes."""
        last, self._last = self._last, None
        if last is None or len(last[1]) < len(keys):
            return None
        rows, made = (tensor[len(tensor) - len(keys) :] for tensor in last)
        heads, plain = keys.shape[1], made.shape[1] // keys.shape[1] - values.shape[2]
        if made.shape[1] % heads or not 0 <= plain <= keys.shape[2]:
            return None
        parts, rotated = made.view(len(keys), heads, -1), keys[:, :1, plain:]
        computed = torch.cat((parts[..., :plain], rotated.expand(-1, heads, -1)), -1)
        return Expanded(torch.cat((rows, rotated[:, 0]), -1), computed, parts[..., plain:])
