"""Triton's interpreter in less time: what it does again in each call of a device function is done once a launch."""

from collections.abc import Callable
from typing import Any


class PatchedOnce:
    """In place of the interpreter's ``_patch_lang``, which exchanges the members of `triton.language` when a launch
    begins, and goes through all of them again in each call within it, though none is left to exchange: a third of the
    interpreter's time."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._launch: Any = None
        self._modules: set[int] = set()

    def __call__(self, fn: Any) -> Any:
        module = id(fn.__globals__)
        # A launch empties its list of changes when it takes them back.
        if self._launch is None or not self._launch._changes:
            self._launch = self._patch(fn)
            self._modules = {module}
        elif module not in self._modules:
            self._patch(fn)
            self._modules.add(module)
        return self._launch


def hasten() -> None:
    """Does so for this process, where Triton is installed and its interpreter is as we know it."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_LangPatchScope") and not isinstance(interpreter._patch_lang, PatchedOnce):
        interpreter._patch_lang = PatchedOnce(interpreter._patch_lang)
