"""A name of the core means one thing."""

import ast
from collections import defaultdict
from pathlib import Path

CORE = sorted((Path(__file__).parents[1] / "src").glob("canary_*"))


def test_no_two_classes_of_the_core_share_a_name():
    """Neither does a class share its name with a type that another module calls so. Classes of generated files and of
    plugins, which are distributions of their own, are not looked at."""
    classes: dict[str, set[str]] = defaultdict(set)
    types: dict[str, set[str]] = defaultdict(set)
    for file in sorted(file for package in CORE for file in package.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(str(file))
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                types[node.targets[0].id].add(str(file))
    doubled = {name: files | types[name] for name, files in classes.items() if len(files | types[name]) > 1}
    assert doubled == {}
