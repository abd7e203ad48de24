"""`Event`: what is told, and where it is documented."""

import ast
import re
from pathlib import Path

from canary_core import Event


def test_every_event_that_is_told_is_documented():
    """The table of `Event` has the name of each event that the core or a plugin tells."""
    root = Path(__file__).parents[1]
    told = set()
    for file in (f for part in ("src", "plugins/*/src") for f in root.glob(f"{part}/**/*.py")):
        calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
        named = (c for c in calls if c.args and ast.unparse(c.func).rpartition(".")[2] in ("Event", "_tell", "_event"))
        told |= {c.args[0].value for c in named if isinstance(c.args[0], ast.Constant)}
    documented = set(re.findall(r"^ *\| ([a-z_]+) +\|", Event.__doc__, re.M)) - {"name"}
    # A finding is logged as one, and told by a hook of its own.
    assert told - documented == {"violation"}
