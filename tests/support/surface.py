"""The public surface as text: every public name with its signature, and those of a class's public methods.

python -m support.surface > tests/public_surface.txt     (with tests/ on PYTHONPATH)
"""

import enum
import inspect
from types import ModuleType
from typing import Any

from pydantic import BaseModel

import canary_adapters
import canary_core
from canary_core import testing

MODULES = (canary_core, testing, canary_adapters)


def lines(module: ModuleType) -> list[str]:
    """One line for each public name of ``module`` and for each public member of its classes."""
    found = []
    for name in sorted(module.__all__):
        thing = getattr(module, name)
        found.append(f"{module.__name__}.{name}{_about(thing)}")
        if inspect.isclass(thing):
            found += [f"    .{member}{about}" for member, about in _members(thing)]
    return found


def text() -> str:
    """All modules' lines."""
    return "\n".join(line for module in MODULES for line in lines(module)) + "\n"


def _members(cls: type) -> list[tuple[str, str]]:
    if issubclass(cls, enum.Enum):
        return [(member.name, "") for member in cls]
    members = [n for n in vars(cls) if not n.startswith("_")] + list(getattr(cls, "__dataclass_fields__", ()))
    settings = getattr(cls, "model_fields", {})
    found = []
    for name in sorted({m for m in (*members, *settings) if not m.startswith(("_", "model_"))}):
        value = inspect.getattr_static(cls, name, None)
        found.append((name, _about(getattr(cls, name)) if callable(getattr(cls, name, None)) else _kind(value)))
    return found


def _about(thing: Any) -> str:
    """Names of the parameters, ``=`` where there is a default; nothing for what can't be called, or is not ours."""
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, (enum.Enum, Exception, BaseModel))):
        return ""
    if not thing.__module__.startswith("canary_"):
        return ""
    parameters = list(inspect.signature(thing).parameters.values())
    shown = []
    for before, p in zip([None, *parameters], parameters, strict=False):
        if p.kind is p.KEYWORD_ONLY and (before is None or before.kind not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)):
            shown.append("*")
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        shown.append(f"{stars}{p.name}{'' if p.default is p.empty else '='}")
    return f"({', '.join(shown)})"


def _kind(value: Any) -> str:
    return " (property)" if isinstance(value, property) else ""


if __name__ == "__main__":
    print(text(), end="")  # noqa: T201  (this is what it is for)
