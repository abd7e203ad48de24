"""`Registrar`: the one place where functions of SGLang are wrapped, through SGLang's own `HookRegistry`."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Literal

from canary_core import PluginError

Hook = tuple[Callable[..., Any], Literal["BEFORE", "AFTER", "AROUND"]]
"""A function, and how it is called: the name of a `HookType` of SGLang's."""


class Registrar:
    """Wraps each function of SGLang once in a process: `HookRegistry` takes no hook back, so what is registered stays,
    and hooks only call on where nothing is guarded."""

    def __init__(self) -> None:
        self._registered: set[str] = set()

    def register(self, hooks: Mapping[str, Hook]) -> None:
        """``hooks`` by the full names of functions. For SGLang's plugin loader, which applies them once all plugins are
        loaded."""
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        for target, (function, kind) in hooks.items():
            if target not in self._registered:
                self._registered.add(target)
                registry.HookRegistry.register(target, function, registry.HookType[kind])

    def apply(self, hooks: Mapping[str, Hook]) -> None:
        """As `register`, and at once: for functions that only some engines have. Raises `PluginError` for one that
        can't be wrapped; SGLang would only log it."""
        if hooks.keys() <= self._registered:
            return
        self.register(hooks)
        importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
        for target in hooks:
            if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
                self._registered.discard(target)
                raise PluginError(f"{target} could not be hooked; see SGLang's log")


REGISTRAR = Registrar()
"""The one of this process: the engine's functions exist once."""
