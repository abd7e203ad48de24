"""The functions of an engine's package, before the installation of a plugin and after its uninstallation."""

import sys
from collections.abc import Mapping


def functions_of(package: str) -> dict[str, object]:
    """Every function and class of a package's imported modules, and every attribute of the classes, by full name."""
    found: dict[str, object] = {}
    modules = [m for name, m in sys.modules.items() if package and (name == package or name.startswith(f"{package}."))]
    for module in modules:
        for name, value in list(vars(module).items()):
            if callable(value):
                found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                for own, inner in vars(value).items():
                    if callable(inner) or isinstance(inner, (staticmethod, classmethod, property)):
                        found[f"{module.__name__}.{name}.{own}"] = inner
    return found


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names of objects replaced, gone, or new in a class. A new one in a module is a late import of the engine."""
    other = {name for name, value in before.items() if after.get(name) is not value}
    return sorted(other | {name for name in after if name not in before and name.rpartition(".")[0] in before})
