"""Loads of weights and adapters into a running engine."""

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor

from canary_adapters import AdapterContents, WeightLoads
from canary_core import Canary, Patches


class Weights:
    """Follows what ``runner`` loads. ``again``: called after an adapter was loaded with another content than before."""

    def __init__(self, canary: Canary, runner: Any, patches: Patches, again: Callable[[], None]) -> None:
        self._canary = canary
        self._adapters = AdapterContents()
        self._again = again
        self.loads = WeightLoads(canary, runner.get_model())
        self.loads.follow(patches, runner, "reload_weights")
        # Called by whatever brings weights, vLLM's own and that of others.
        self.loads.follow(patches, runner.get_model(), "load_weights")
        manager = getattr(runner, "lora_manager", None)
        self.adapters: Callable[[], Container[int]] = getattr(manager, "list_adapters", tuple)
        if hasattr(manager, "_load_adapter"):
            patches.follow(manager, "_load_adapter", self._loaded)

    def _loaded(self, adapter: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        name = adapter_name(request)
        if name is not None and self._canary.enabled and self._adapters.loaded(name, _tensors(adapter)):
            self._canary.step.weights_changed(f"{request.lora_name} was loaded again", lora=name)
            self._again()


def adapter_name(request: Any) -> str | None:
    """An adapter by name and place, None for none."""
    return request and f"{request.lora_name} of {request.lora_path}"


def _tensors(adapter: Any) -> Iterator[Tensor]:
    parts = (part for layer in adapter.loras.values() for part in (layer.lora_a, layer.lora_b, layer.scaling))
    every = (one for part in parts for one in (part if isinstance(part, (list, tuple)) else (part,)))
    return (one if isinstance(one, Tensor) else torch.tensor(float(one)) for one in every if one is not None)
