"""The API reference docs/api.md: every public name with its signature and docstring, from the sources.

PYTHONPATH=src:tests python -m support.api > docs/api.md
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import canary_adapters
import canary_core
from canary_core import testing
from canary_core.guard.sampling import SampledTokens
from canary_core.guard.slots import SlotEvents
from canary_core.guard.step import Step
from canary_core.runtime.witness import Witness
from canary_core.runtime.writers import Writers
from canary_core.watchers.tables import TableCheck

REACHED = {
    "canary.slots": SlotEvents,
    "canary.step": Step,
    "canary.step.tables": TableCheck,
    "canary.writers": Writers,
    "canary.sampled": SampledTokens,
    "canary.witness": Witness,
}
"""Parts of a `Canary` that a plugin calls."""
MODULES: tuple[tuple[ModuleType, str], ...] = (
    (canary_core, "The core. `from canary_core import ...`"),
    (canary_adapters, "The usual layouts of pools and tables. `from canary_adapters import ...`"),
    (testing, "For tests of a plugin. `from canary_core.testing import ...`"),
)
HEAD = """# API reference

Every public name, with its signature and its docstring: shapes, dtypes, units, errors.
[plugin-author.md](plugin-author.md) says in which order to use them. Settings are in [settings.md](settings.md), hooks
of plugins in [plugins.md](plugins.md). Written by [support/api.py](../tests/support/api.py).

"""


def text() -> str:
    """The page."""
    parts = [HEAD, "## Parts of a Canary\n\nWith `canary` the `Canary` of a pool.\n\n"]
    for name, cls in REACHED.items():
        parts += [f"### `{name}`\n\n", *list(_class(cls))[1:]]
    for module, what in MODULES:
        parts.append(f"## {module.__name__}\n\n{what}\n\n")
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if inspect.isclass(thing) and thing.__module__.startswith("canary_"):
                parts += [f"### `{name}`\n\n", *_class(thing)]
            elif inspect.isfunction(thing) and thing.__module__.startswith("canary_"):
                (node,) = (n for n in _tree(thing.__module__).body if getattr(n, "name", "") == thing.__name__)
                parts += [f"### `{name}`\n\n", _code(_signature(node)), _doc(node)]
    return "".join(parts).rstrip() + "\n"


def _class(cls: type) -> Iterator[str]:
    """Its call, its docstring, and its public methods and properties."""
    node = _node(cls)
    yield _code(_constructor(node))
    yield _doc(node)
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_") and ast.get_docstring(member):
            marks = {ast.unparse(mark).partition("(")[0] for mark in member.decorator_list}
            if marks & {"property", "cached_property"}:
                returns = f": {ast.unparse(member.returns)}" if member.returns else ""
                yield _code(f"{member.name}{returns}")
            else:
                yield _code(_signature(member, bound="staticmethod" not in marks))
            yield _doc(member)


def _constructor(node: ast.ClassDef) -> str:
    own = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    if own:
        return _signature(own[0], named=node.name)
    if not any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
        return f"class {node.name}"
    fields = []
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and "init=False" not in ast.unparse(field):
            value = ast.unparse(field.value) if field.value is not None else ""
            if value.startswith("field("):
                value = "..."
            fields.append(
                f"{ast.unparse(field)}" if not value else f"{ast.unparse(field).partition(' = ')[0]} = {value}"
            )
    return f"{node.name}({', '.join(fields)})"


def _signature(node: ast.AST, named: str = "", bound: bool = True) -> str:
    assert isinstance(node, ast.FunctionDef)
    shown = ast.unparse(node.args)
    first = node.args.args[0].arg if node.args.args else ""
    if first in ("self", "cls") and bound:
        shown = shown.removeprefix(first).removeprefix(", ")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and not named else ""
    return f"{named or node.name}({shown}){returns}"


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _node(cls: type) -> ast.ClassDef:
    nodes = ast.walk(_tree(cls.__module__))
    return next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == cls.__name__)


def _code(line: str) -> str:
    return f"```text\n{line}\n```\n\n"


def _doc(node: ast.AST) -> str:
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef))
    said = textwrap.dedent(ast.get_docstring(node) or "")
    said = re.sub(r"::(\n\n(?: {4}.*\n?|\n)+)", r":\1", said.replace("``", "`"))
    return f"{said}\n\n" if said else ""


if __name__ == "__main__":
    sys.stdout.write(text())
