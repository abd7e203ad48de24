"""Who may import whom: core ← kit ← desk, core ← adapters ← plugins, engines only in their own plugin."""

import ast
import graphlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PLUGINS = {package.parent.name: package.parent for package in ROOT.glob("plugins/*/src/*/__init__.py")}
DISTRIBUTIONS = [ROOT, *(p.parent for p in sorted(ROOT.glob("plugins/*/pyproject.toml")))]
PUBLIC = ("canary_core", "canary_core.testing", "canary_adapters")
OPTIONAL = {"opentelemetry"}
"""What an extra of canary-core brings, imported inside functions only."""
ENGINES = ("lmdeploy", "sglang", "tensorrt_llm", "transformers", "vllm")


def imports(package: Path) -> Iterator[tuple[str, str]]:
    """Every (file:line, imported module) of a package, inside functions too."""
    files = sorted(package.rglob("*.py"))
    assert files, f"{package} holds no Python file"
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno} imports relatively; name the package"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                yield f"{file.relative_to(ROOT)}:{node.lineno}", name


def top_level(package: Path) -> Iterator[tuple[str, str]]:
    """The same with the top-level modules only."""
    for place, name in imports(package):
        yield place, name.partition(".")[0]


def requirements(project: Path) -> dict[str, str]:
    """Hard dependencies of the distribution in folder ``project``: top-level module → the rest of the requirement."""
    found = tomllib.loads(project.joinpath("pyproject.toml").read_text())["project"]["dependencies"]
    split = (re.fullmatch(r"([\w-]+)(.*)", d) for d in found)
    return {m[1].replace("-", "_"): m[2] for m in split if m}


def declared() -> set[str]:
    """Top-level modules of canary-core's dependencies."""
    return set(requirements(ROOT))


@pytest.mark.parametrize(
    ("package", "may_import"),
    [
        ("canary_core", {"canary_core"}),
        ("canary_adapters", {"canary_adapters", "canary_core"}),
        ("canary_kit", {"canary_core", "canary_kit"}),
        ("canary_desk", {"canary_core", "canary_desk", "canary_kit"}),
    ],
)
def test_src_imports_only_downwards(package, may_import):
    """The core imports neither adapters nor plugins nor engines, the adapters neither plugins nor engines: each package
    imports only itself, what is below, the standard library and declared dependencies. The core's two doors,
    testing.py and __main__.py, are the exception."""
    allowed = may_import | declared() | OPTIONAL | sys.stdlib_module_names
    found = [i for i in top_level(ROOT / "src" / package) if i[1] not in allowed]
    assert {place.partition(":")[0] for place, _ in found} == (DOORS if package == "canary_core" else set())


DOORS = {"src/canary_core/__main__.py", "src/canary_core/testing.py"}
"""Files of the core that users call, and that belong to the desk and the kit."""


def test_kernels_import_nothing_of_their_reference():
    """What kernels are compared with must not be part of them."""
    package = ROOT / "src" / "canary_core" / "ops" / "kernels"
    assert [i for i in imports(package) if i[1].startswith("canary_core.ops.torch")] == []


@pytest.mark.parametrize("project", DISTRIBUTIONS, ids=lambda p: p.name)
def test_installing_moves_nothing_of_an_engine(project):
    """No distribution of ours requires an engine, and none sets an upper bound or a pin on torch or triton."""
    found = requirements(project)
    assert found.keys().isdisjoint(ENGINES)
    for name in {"torch", "triton"} & found.keys():
        assert re.match(r">=[\d.]+(;|$)", found[name]), f"{project.name}: {name}{found[name]}"


@pytest.mark.parametrize("project", DISTRIBUTIONS, ids=lambda p: p.name)
def test_every_wheel_says_what_it_is_and_carries_the_licence(project):
    """Each distribution is installed by itself, so each has its own copy of the licence, the same one."""
    about = tomllib.loads(project.joinpath("pyproject.toml").read_text())["project"]
    assert about["license-files"] == ["LICENSE"]
    assert project.joinpath("LICENSE").read_text() == ROOT.joinpath("LICENSE").read_text()
    assert about["description"].endswith(".")
    assert {"kv-cache", "sanitizer"} <= set(about["keywords"])
    assert "Typing :: Typed" in about["classifiers"]
    packages = [folder for folder in project.joinpath("src").iterdir() if folder.joinpath("__init__.py").exists()]
    assert [package.name for package in packages if not package.joinpath("py.typed").exists()] == []


@pytest.mark.parametrize("folder", [*PLUGINS.values(), ROOT / "examples"], ids=lambda f: f.name)
def test_plugins_and_examples_live_on_the_public_surface(folder):
    """They import ``canary_core``, ``canary_core.testing`` and ``canary_adapters``, and nothing deeper."""
    deeper = []
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = (n for n in names if n and n.split(".")[0] in ("canary_core", "canary_adapters"))
            deeper += [f"{file}:{node.lineno} {n}" for n in ours if n not in PUBLIC]
            if isinstance(node, ast.ImportFrom) and node.module in PUBLIC:
                known = importlib.import_module(node.module).__all__
                deeper += [f"{file}:{node.lineno} {a.name}" for a in node.names if a.name not in known]
    assert deeper == []


@pytest.mark.parametrize("plugin", sorted(PLUGINS))
def test_plugins_import_no_other_plugin(plugin):
    """A plugin stands alone: removing another one never breaks it."""
    others = PLUGINS.keys() - {plugin}
    assert [i for i in top_level(PLUGINS[plugin]) if i[1] in others] == []


@pytest.mark.parametrize("plugin", sorted(PLUGINS))
def test_plugins_import_their_engine_inside_functions_only(plugin):
    """Finding and listing a plugin must not import its engine, which may be slow, missing or broken."""
    check = f"import sys, {plugin}; print([e for e in {ENGINES!r} if e in sys.modules])"
    assert output_of(check) == "[]"


def test_importing_the_core_is_light():
    """Importing canary_core imports neither triton nor an engine."""
    check = (
        f"import sys, canary_core, canary_adapters; print([m for m in {('triton', *ENGINES)!r} if m in sys.modules])"
    )
    assert output_of(check) == "[]"


FLOORS = ("nouns", "ops", "runtime", "watchers", "guard", "plugins", "kit", "desk")
"""The core's rooms and the packages above them, the lowest first. Flat files, config/ and kinds/ are nouns; testing.py
is the kit's front door."""


def floor(module: str) -> int:
    """Number of the floor on which the room of ``module`` is."""
    package, room = f"{module}.".split(".")[:2]
    room = {"canary_kit": "kit", "canary_desk": "desk"}.get(package, room)
    room = {"testing": "kit", "__main__": "desk", "": "desk"}.get(room, room)
    return FLOORS.index(room) if room in FLOORS else 0


def test_rooms_import_only_rooms_below():
    """What runs in or around a forward knows nothing of what explains, shows, serves or tests: also not for type
    checkers, nor inside functions."""
    upward = [
        f"{name} imports {whom}"
        for name, file in CORE.items()
        for whom in core_imports(name, file)
        if floor(whom) > floor(name) and name != "canary_core" and (whom != "canary_core" or floor(name) < KIT)
    ]
    assert upward == []


KIT = FLOORS.index("kit")


def test_importing_the_core_loads_nothing_of_the_desk_and_little_else():
    """`canary_core` is the guard: pages, tables and terminals are for those who ask for them."""
    code = (
        "import sys, canary_core; ours = [m for n, m in sys.modules.items() if n.startswith('canary_')]; "
        "print(len(ours), sum(len(open(m.__file__).readlines()) for m in ours), "
        "[m for m in ('jinja2', 'rich', 'typer', 'canary_desk', 'canary_kit') if m in sys.modules])"
    )
    modules, lines, asked_for = output_of(code).split(maxsplit=2)
    assert asked_for == "[]"
    assert int(modules) <= MOST_MODULES
    assert int(lines) <= MOST_LINES


MOST_MODULES, MOST_LINES = 80, 11_100


def test_an_engine_that_is_guarded_loads_no_terminal_and_no_template():
    """Not even where something was found, diagnosed and told. (The console that structlog brings is rich's.)"""
    code = (
        "import sys; sys.path.insert(0, 'tests'); from support.guarded import Guarded\n"
        "guarded = Guarded(read_check=-1)\n"
        "guarded.submit(); guarded.step(); guarded.engine.v[1].zero_(); guarded.decode(); guarded.canary.close()\n"
        "assert guarded.findings.told('diagnosis')\n"
        "print([m for m in ('jinja2', 'rich.progress', 'typer') if m in sys.modules])"
    )
    assert output_of(code) == "[]"


KNOWN_CIRCLES: set[tuple[str, str]] = set()
"""Imports (who, whom) that close a circle and are still to be undone."""


def test_no_module_of_the_core_imports_itself_by_a_detour():
    """The modules of core, kit and desk can be read in an order in which each knows only those before it: imports for
    type checkers and inside functions count as well. Left out is hookspecs.py, which only names the types that plugins
    are given."""
    graph = {name: core_imports(name, file) for name, file in CORE.items() if name != "canary_core.plugins.hookspecs"}
    missing = {(who, whom) for who, whom in KNOWN_CIRCLES if whom not in graph[who]}
    assert missing == set(), "these are undone; take them out of KNOWN_CIRCLES"
    for who, whom in KNOWN_CIRCLES:
        graph[who].discard(whom)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' <- '.join(error.args[1])}")


CORE = {
    ".".join(file.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): file
    for package in ("canary_core", "canary_kit", "canary_desk")
    for file in ROOT.glob(f"src/{package}/**/*.py")
}


def core_imports(name: str, file: Path) -> set[str]:
    """Modules of core, kit and desk that the module ``name`` imports. A package that is passed on the way to one of its
    modules does not count."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = inside & CORE.keys()
            found |= modules if modules == inside else {node.module, *modules}
    return (found & CORE.keys()) - {name}


def output_of(code: str) -> str:
    """What a fresh Python prints when it runs ``code`` with our packages at hand."""
    paths = [ROOT / "src", *ROOT.glob("plugins/*/src")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=ROOT
    ).stdout.strip()
