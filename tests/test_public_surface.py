"""The public surface and the hooks: small, sorted, documented, used."""

import ast
import inspect
from pathlib import Path

import pytest
from support import api, surface

import canary_core
from canary_core.plugins import hookspecs

ROOT = Path(__file__).parents[1]
UNDOCUMENTED = ("Level", "PROTOCOL", "__version__", "hookimpl")
"""What has no docstring of its own at run time."""
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("canary_")}


def test_all_is_sorted_and_complete():
    """``__all__`` is sorted, constants first as ruff has it, and every name in it exists."""
    assert list(canary_core.__all__) == sorted(canary_core.__all__, key=lambda name: (not name.isupper(), name))
    assert [n for n in canary_core.__all__ if not hasattr(canary_core, n)] == []


def test_a_shell_completes_every_public_name():
    """Those, too, whose module is loaded with their first use; and nothing else is there."""
    assert set(canary_core.__all__) <= set(dir(canary_core))
    with pytest.raises(AttributeError, match="no attribute 'Canarry'"):
        canary_core.Canarry  # noqa: B018  (the look is the test)


def test_the_public_surface_is_what_was_agreed():
    """Every public name, method and parameter is in public_surface.txt: plugins live on them, so each change is one of
    that file. ``PYTHONPATH=src:tests python -m support.surface > tests/public_surface.txt`` writes the file anew."""
    assert surface.text() == Path(__file__).with_name("public_surface.txt").read_text()


def test_the_api_reference_is_that_of_the_sources():
    """docs/api.md has every public name with its signature and docstring. ``PYTHONPATH=src:tests python -m support.api
    > docs/api.md`` writes the page anew."""
    assert api.text() == (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_public_names_are_documented():
    """Every public class and function has a docstring."""
    public = (getattr(canary_core, n) for n in canary_core.__all__ if n not in UNDOCUMENTED)
    assert [thing.__name__ for thing in public if not thing.__doc__] == []


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_every_hook_is_documented(hook):
    """A hook's docstring says when it is called; its parameters are annotated."""
    assert len(inspect.getdoc(HOOKS[hook]) or "") > 20
    parameters = inspect.signature(HOOKS[hook]).parameters
    assert [n for n, p in parameters.items() if p.annotation is p.empty] == []


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_every_hook_is_called_and_implemented(hook):
    """A hook that nothing calls, or that no plugin or test implements, is not part of the surface."""
    ours = [f for f in ROOT.glob("src/**/*.py") if f.name != "hookspecs.py"]
    assert any(hook in calls(f) for f in ours), f"nothing in src/ calls {hook}"
    others = [f for part in ("plugins/*/src", "plugins/*/tests", "tests") for f in ROOT.glob(f"{part}/**/*.py")]
    assert any(f"def {hook}(" in f.read_text() for f in (*ours, *others)), f"no plugin or test implements {hook}"


def calls(file: Path) -> set[str]:
    """Names that a file uses as attributes or strings."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found
