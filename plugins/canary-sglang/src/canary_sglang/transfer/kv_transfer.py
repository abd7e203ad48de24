"""KV that reaches the pool by another way than a forward: what the two ways (HiCache, PD disaggregation) share."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.canary import Canary
from canary_core.errors import PluginError


class KVTransfer:
    """One way by which bytes reach a session's pool. Methods are called by `Session.forward`, on its stream."""

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """Before a forward is checked: what its slots received is made known. Gives the view to check, ``view`` or
        one that says more. ``batch``: None where several of the engine's forwards are one to us."""
        return view

    def landed(self) -> None:
        """Right after the engine's forward: all that it waited for has arrived."""

    def flushed(self) -> None:
        """The engine has emptied its caches."""

    def ended(self) -> None:
        """The Canary is off from now on. Called once."""


def plain_names(canary: Canary) -> dict[str, str]:
    """Regions' names without the model's, e.g. ``full`` → ``draft/full``."""
    return {name.rpartition("/")[2]: name for name in canary.regions}


def region_slots(canary: Canary, region: str, slots: Tensor) -> Tensor:
    """The region's slots of an allocator's ``slots``, -1 where there is none (padding, or evicted from a window)."""
    guarded = canary.regions[region]
    own = slots.long()
    if guarded.slot_map is not None:
        own = guarded.slot_map[own].long()
    if guarded.tokens_per_slot > 1:
        own = own // guarded.tokens_per_slot
    own = guarded.rows(own)
    return own if guarded.null_slot is None else torch.where(own == guarded.null_slot, -1, own)


def used_here(*tensors: Tensor) -> None:
    """The current stream reads tensors that were made on another one: their memory must not be reused before."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


Hook = tuple[Callable[..., Any], str]
"""A function and how it is called: the name of a `HookType`."""


def apply_hooks(hooks: Mapping[str, Hook]) -> None:
    """Wraps functions of engine parts that only some engines have, through SGLang's own `HookRegistry`. Each target is
    wrapped once in a process. Raises `PluginError` for one that can't be."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    for target, (function, kind) in hooks.items():
        if target not in _applied:
            registry.HookRegistry.register(target, function, registry.HookType[kind])
    registry.HookRegistry.apply_hooks()
    for target in hooks:
        if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
            raise PluginError(f"{target} could not be hooked; see SGLang's log")
        _applied.add(target)


_applied: set[str] = set()
