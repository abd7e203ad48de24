"""Docstrings and pages as words: the pronouns among them, and the names in backticks that the code does not have."""

import ast
import builtins
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from canary_core.config import CanaryConfig
from canary_core.config.shown import settings
from canary_core.records import Kind

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("src/*/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
ELSEWHERE = {
    "packages": ("torch", "triton", "pydantic", "rich", "sglang", "vllm", "transformers", "signal"),
    "SGLang": (
        "ForwardBatch", "GenerationBatchResult", "KVArgs", "MambaPool", "Req", "init_memory_pool", "mamba_cache_cpu",
        "NoOpMHATokenToKVPool", "HiMambaRadixCache", "LMCRadixCache", "MambaRadixCache", "EagleDraftInput",
        "torch_flex", "intel_amx", "unguarded_split_prefill_forward_tokens", "SGLANG_OPT_USE_ONLINE_COMPRESS",
        "c_plan.cuh", "c4_v2.cuh", "c128_v2.cuh",
    ),
    "vLLM": ("InputBatch", "RayExecutorV2"),
    "Transformers": ("FutureRequestState",),
    "torch and Triton": ("DTensor", "ASTSource"),
    "arguments and examples": ("PARENT", "CNRYLGR1", "canary_my_engine", "MyEngine"),
}  # fmt: skip
"""Names that docstrings and pages may use though no code of ours has them, by where they come from."""
FILE = re.compile(r"[\w/-]+\.(py|cuh|md|json|jsonl|toml|txt|jinja|bin)")
COMPOSED = re.compile(r"(?:kv_canary|ledger|swept|unguarded)_(\w+?)(?:_range|_tokens|_forward_tokens)?")
"""Metrics and fields whose names the code puts together from parts."""
DIARIES = frozenset({"evidence.md", "tuning.md"})
"""Pages that also tell of what there was."""
PAGES = [
    page
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")])
    if page.name not in DIARIES
]
PRONOUNS = {
    "it", "its", "they", "them", "their", "this", "that", "these", "those", "which", "what", "who", "whom", "whose",
}  # fmt: skip
"""Counted wherever they stand, as pronoun, conjunction or article: pluggy, structlog, rich and prometheus_client have
1.3 to 3.3 % of these words in their docstrings."""


@dataclass(frozen=True)
class Docstring:
    """A string that stands as a statement: of a module, class or function, or of the attribute above it."""

    file: Path
    line: int
    text: str
    printed: bool = False
    """Shown to users as it is: help of a command, or what a test of the conformance suite is about."""

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"

    @property
    def words(self) -> list[str]:
        """Its words in lower case, with one ``x`` for each span of code."""
        return re.findall(r"[a-z']+", re.sub(r"(`+)[^`]+\1", "x", self.text).lower())


def docstrings(files: Iterable[Path]) -> Iterator[Docstring]:
    """Every docstring of ``files``."""
    for file in files:
        for node in ast.walk(parsed(file)):
            for statement in getattr(node, "body", ()) if isinstance(node, _HOLDERS) else ():
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield Docstring(file, statement.lineno, text, statement is node.body[0] and _printed(node))


def comments(files: Iterable[Path]) -> Iterator[Docstring]:
    """Every comment of ``files``, those on lines one after the other as one."""
    for file in files:
        block: list[str] = []
        for number, line in enumerate([*file.read_text().splitlines(), ""], 1):
            if line.lstrip().startswith("# "):
                block.append(line.strip("# "))
            elif block:
                yield Docstring(file, number - len(block), " ".join(block))
                block = []


def pronouns(files: Iterable[Path]) -> float:
    """Share of pronouns in the words of those docstrings of ``files`` that are for readers of the code."""
    words = [word for found in docstrings(files) if not found.printed for word in found.words]
    return sum(word in PRONOUNS for word in words) / max(len(words), 1)


def _printed(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    commands = {"command", "callback"}
    decorators = {n.attr for d in node.decorator_list for n in ast.walk(d) if isinstance(n, ast.Attribute)}
    return node.name.startswith("test_") or bool(commands & decorators)


def spans(text: str) -> list[str]:
    """Code in the sentences of ``text``: what stands between backticks, single or double, outside of fences."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    return [" ".join(code.split()) for _, code in re.findall(r"(`{1,2})([^`]+)\1", text)]


def names(span: str) -> list[str]:
    """Dotted names of ``span`` if it is a name, a file, or an expression in Python; none if it is anything else."""
    if FILE.fullmatch(span):
        return [span.rpartition("/")[2]]
    if span.startswith("-"):
        return []
    try:
        tree = ast.parse(span.strip(), mode="eval")
    except SyntaxError:
        return []
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    outer = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Name) and id(n) not in inside)
    found = (ast.unparse(node) for node in outer)
    return [name for name in found if re.fullmatch(r"[\w.]{2,}", name) and not name.endswith("_")]


@dataclass
class Code:
    """Names that the code of some folders has."""

    words: set[str] = field(default_factory=set)
    """Every identifier, every identifier in a string, every module, and every setting's variable."""
    files: set[str] = field(default_factory=set)
    """Names of files, also of those that the code writes."""
    members: dict[str, set[str]] = field(default_factory=dict)
    """Class or module → its members, own and inherited from classes of ours; a name of two has those of both."""
    packages: dict[str, set[str]] = field(default_factory=dict)
    """Module → folders that have one of this name."""
    open: set[str] = field(default_factory=set)
    """Classes with a base that is not ours, whose members nobody here can list."""

    def lacks(self, name: str) -> bool:
        """Whether ``name``, dotted or not, is nowhere in the code. The member of ``Owner.member`` must belong to a
        class of ours called ``Owner``; that of ``owner.member`` to any class of ours, or to the module ``owner``."""
        parts = name.split(".")
        if parts[0] in _ELSEWHERE or name in self.files:
            return False
        if any(part not in self.words and not self._composes(part) for part in parts):
            return True
        return any(self._apart(a, b) for a, b in pairwise(parts)) or self._misplaced(parts)

    def _apart(self, owner: str, member: str) -> bool:
        return owner in self.members and owner not in self.open and not self._has(owner, member)

    def _misplaced(self, parts: list[str]) -> bool:
        *_, package, module, member = ("", "", *parts)
        known = self.packages.get(module)
        return bool(known and package) and package not in known and member in self.members[module]

    def _composes(self, name: str) -> bool:
        parts = COMPOSED.fullmatch(name)
        return parts is not None and parts[1] in self.words

    def _has(self, owner: str, member: str) -> bool:
        of_objects = member.islower() and owner.islower() and any(member in m for m in self.members.values())
        return of_objects or member in self.members[owner]


@functools.cache
def parsed(file: Path) -> ast.Module:
    """The syntax tree of ``file``."""
    return ast.parse(file.read_text(), str(file))


@functools.cache
def code() -> Code:
    """Names of everything that is written in Python here, and of what watches Canary from outside."""
    found = Code(words={*dir(builtins), *sys.stdlib_module_names})
    found.words |= {s.variable for s in settings(CanaryConfig())} | {kind.name.lower() for kind in Kind}
    for file in ROOT.glob("monitoring/*"):
        found.words |= set(re.findall(r"\w+", file.read_text()))
    bases: dict[str, set[str]] = {}
    folders = (ROOT / name for name in ("src", "plugins", "tests", "examples", "benchmarks"))
    for file in sorted(f for folder in folders for f in folder.rglob("*.py") if "build" not in f.parts):
        found.words |= set(file.relative_to(ROOT).with_suffix("").parts)
        found.files.add(file.name)
        tree = parsed(file)
        found.words |= set(_identifiers(tree))
        found.files |= {text for text in _strings(tree) if FILE.fullmatch(text)}
        if file not in SOURCES:
            continue
        module = file.parent.name if file.stem == "__init__" else file.stem
        found.packages.setdefault(module, set()).add(file.parents[file.stem == "__init__"].name)
        beside = {f.stem for f in file.parent.iterdir()} if file.stem == "__init__" else set()
        reexports = bool(beside) or "__all__" in _bound(tree.body)
        found.members.setdefault(module, set()).update(beside, _bound(tree.body, reexports))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.members.setdefault(node.name, set()).update(_bound(node.body), _given_to_self(node), _COMMON)
                bases.setdefault(node.name, set()).update(ast.unparse(base).split("[")[0] for base in node.bases)
    for name in bases:
        above = list(bases[name])
        for base in above:
            above += bases.get(base, set()) - set(above)
            found.members[name] |= found.members.get(base, set())
        if any(base not in bases and base not in _PLAIN for base in above):
            found.open.add(name)
    return found


_ELSEWHERE = {name for names in ELSEWHERE.values() for name in names}
_HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PLAIN = {"object", "Protocol", "Generic", "NamedTuple", "ABC"}
"""Bases that bring no member which a docstring would name."""
_COMMON = {"__init__", "__post_init__", "__call__", "__name__", "__doc__"}


def _identifiers(tree: ast.Module) -> Iterator[str]:
    """Identifiers of ``tree`` and, outside of docstrings, the words in its strings."""
    for text in _strings(tree):
        yield from re.findall(r"[A-Za-z_]\w*", text)
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (*name.split("."), other or name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


def _strings(tree: ast.Module) -> Iterator[str]:
    """Strings and bytes of ``tree`` that are no docstrings."""
    prose = {id(s.value) for n in ast.walk(tree) if isinstance(n, _HOLDERS) for s in n.body if isinstance(s, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in prose:
            yield node.value if isinstance(node.value, str) else node.value.decode("latin-1")


def _bound(body: list[ast.stmt], reexports: bool = False) -> Iterator[str]:
    """Names that the statements of ``body`` bind, also under conditions; with ``reexports`` by imports too."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=found) | ast.ImportFrom(names=found) if reexports:
                yield from ((a.asname or a.name).partition(".")[0] for a in found)
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                yield from (*_bound(inner, reexports), *_bound(other, reexports))
            case ast.Assign(targets=targets):
                yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def _given_to_self(node: ast.ClassDef) -> Iterator[str]:
    """Attributes that methods of a class give to their object, and its slots."""
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                yield from _identifiers(ast.Module([ast.Assign([], value)], []))
