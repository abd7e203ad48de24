"""`Registrar`: wraps functions of SGLang through SGLang's own `HookRegistry`. Nothing else wraps any."""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Container, Mapping
from types import FrameType
from typing import Any, Literal

from canary_core import PluginError

Hook = tuple[Callable[..., Any], Literal["BEFORE", "AFTER", "AROUND"]]
"""A function, and the time of its call: the name of one of SGLang's `HookType` values."""


class Registrar:
    """Wraps each function of SGLang once in a process. `HookRegistry` can't remove hooks, so they stay: where nothing
    is guarded, they only call the wrapped function."""

    def __init__(self) -> None:
        self._registered: set[str] = set()

    def register(self, hooks: Mapping[str, Hook]) -> None:
        """Registers ``hooks``, by the full names of functions. SGLang's plugin loader applies them once all plugins are
        loaded, once in a process; after that they are applied now."""
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        new = [target for target in hooks if target not in self._registered]
        for target in new:
            self._registered.add(target)
            function, kind = hooks[target]
            registry.HookRegistry.register(target, function, registry.HookType[kind])
        if new and _loader_is_done(registry):
            registry.HookRegistry.apply_hooks()

    def apply(self, hooks: Mapping[str, Hook]) -> None:
        """Registers and applies hooks now: for functions used by some engines only. Raises `PluginError` for a function
        that can't be wrapped; SGLang would only log the failure."""
        if hooks.keys() <= self._registered:
            return
        self.register(hooks)
        importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
        for target in hooks:
            if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
                self._registered.discard(target)
                raise PluginError(f"{target} could not be hooked; see SGLang's log")

    def left_out(self) -> list[str]:
        """Functions registered but not hooked, after SGLang's loader has applied all: failures there are logged and
        swallowed."""
        registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
        applied = getattr(registry, "_patched", None)
        return sorted(target for target in self._registered if not _is_hooked(target, applied))


def _is_hooked(target: str, applied: Container[str] | None) -> bool:
    if applied is not None:
        return target in applied
    owner, _, name = target.rpartition(".")
    return hasattr(getattr(pkgutil.resolve_name(owner), name, None), "__wrapped__")


def is_applying() -> bool:
    """Whether a thread of the process is within SGLang's plugin loader, which imports much while applying hooks."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_name in ("apply_hooks", "load_plugins") and "sglang" in at.f_code.co_filename:
                return True
            at = at.f_back
    return False


def _loader_is_done(registry: Any) -> bool:
    """Whether SGLang's plugin loader has run in the process; not while it runs. False in releases that don't say."""
    source = getattr(registry, "_current_plugin_source", None)
    loader = importlib.import_module("sglang.srt.plugins")
    return source is not None and source.get() is None and bool(getattr(loader, "_plugins_loaded", False))


REGISTRAR = Registrar()
"""The only one in the process."""
