"""Recurrent layers in a second forward: which models are computed again, and random roundings within these layers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from canary_core import KVSource, Region, Role

_BOTH = (torch.float32, torch.bfloat16)
MEASURED: Mapping[str, tuple[torch.dtype, ...]] = {
    "bamba": _BOTH, "falcon_h1": _BOTH, "lfm2": _BOTH, "lfm2_moe": _BOTH, "olmo_hybrid": _BOTH, "qwen3_5_text": _BOTH,
}  # fmt: skip
"""Types of models, and of their numbers, of which 300 clean rows and more were computed again, and none differed."""

LAYERS = ("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer")
"""Layers of caches with states beside K and V, or with states alone."""

_EXACT = frozenset(
    {
        "_to_copy", "abs", "arange", "bincount", "cat", "clone", "constant_pad_nd", "embedding", "empty", "empty_like",
        "empty_strided", "full", "full_like", "gather", "histc", "index", "index_select", "masked_fill", "max", "min",
        "neg", "new_empty", "new_full", "new_zeros", "ones", "ones_like", "rand", "repeat", "scalar_tensor", "sort",
        "stack", "topk", "tril", "triu", "where", "zeros", "zeros_like",
    }
)  # fmt: skip
"""Operations that round nothing, or only what was rounded before."""


def keeps_states(model: Any) -> bool:
    """Whether a cache of ``model`` has layers with states."""
    from transformers import DynamicCache

    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:
        return False
    return any(hasattr(layer, "conv_states") for layer in layers)


def refusal(model: Any) -> str | None:
    """Why rows of ``model``, whose caches have layers with states, are not computed again; None where they are."""
    kind = model.config.get_text_config().model_type
    if model.dtype in MEASURED.get(kind, ()):
        return None
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        return (
            f"of models of type {kind!r}, rounding may send a token to another expert, and states keep that for all "
            "tokens behind"
        )
    return f"of models of type {kind!r} in {model.dtype}, which keep states, no noise was measured"


def states(layers: Sequence[Any]) -> Iterator[tuple[int, str, Tensor]]:
    """Layer, name and numbers ``[rows of the batch, ...]`` of each state in the layers of a cache."""
    for index, layer in enumerate(layers):
        for name in ("conv", "recurrent"):
            held: Mapping[int, Tensor | None] = getattr(layer, f"{name}_states", {})
            for part, state in held.items():
                if state is not None:
                    yield index, name if len(held) == 1 else f"{name}{part}", state


def regions(layers: Sequence[Any], row: int) -> dict[str, Region]:
    """States of one row of the batch, as regions whose slots are rows of numbers: of a head and one of its sizes, or of
    a channel. By name of a region: states of the same name, and as many rows."""
    found: dict[tuple[str, int], list[KVSource]] = {}
    for layer, name, state in states(layers):
        own = state[row].contiguous()
        size = own.shape[-1] * own.element_size()
        source = KVSource(own, name, layer, size, size, dtype=own.dtype, role=Role.STATE)
        found.setdefault((name, own.numel() // own.shape[-1]), []).append(source)
    named = {
        (f"{name} state" if sum(n == name for n, _ in found) == 1 else f"{name} state of {rows} rows"): (rows, sources)
        for (name, rows), sources in found.items()
    }
    return {name: Region(name, rows, tuple(sources)) for name, (rows, sources) in named.items()}


class Roundings(TorchDispatchMode):
    """Multiplies each number that an operation of a recurrent layer computes by a random one within a rounding of its
    type, from its first state on (`begin`) until its last one is stored (`end`): so a state is as far off as any order
    of the same operations may make it."""

    def __init__(self, own: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = own
        self._begun = False

    def begin(self) -> None:
        """A recurrent layer has begun."""
        self._begun = True

    def end(self) -> None:
        """It has stored all that it keeps, or attention or the next forward has begun."""
        self._begun = False

    def stored(self, layers: Sequence[Any]) -> None:
        """Rounds states once more, as by a decode that stores them."""
        for _, _, state in states(layers):
            state.copy_(jittered(state, torch.finfo(state.dtype).eps / 2, self._own))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self._begun or not isinstance(made, Tensor) or not made.is_floating_point():
            return made
        (returned,) = func._schema.returns
        if returned.alias_info is not None or func._opname in _EXACT:
            return made
        return jittered(made, torch.finfo(made.dtype).eps / 2, self._own)


def jittered(numbers: Tensor, jitter: float, own: torch.Generator) -> Tensor:
    """Each of ``numbers`` times a random one between ``1 - jitter`` and ``1 + jitter``."""
    random = 2 * torch.rand(numbers.shape, generator=own, device=numbers.device) - 1
    # In 32 bits, where a factor so near to 1 can be written.
    return (numbers.float() * (1 + jitter * random)).to(numbers.dtype)
