"""What the documentation says must be so: examples run, links lead somewhere, names exist, tables are complete."""

import ast
import json
import re
from pathlib import Path

import pytest
from support import confusion, pages
from typer.main import get_command
from typer.testing import CliRunner

import canary_core
from canary_core.config import CanaryConfig
from canary_core.config.shown import settings
from canary_core.events import Event
from canary_core.guard.slots import SlotEvents
from canary_core.plugins import hookspecs
from canary_core.records import Kind
from canary_desk.cli.app import EXIT_CODES, app
from canary_kit.faults.catalogue import FAULTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
HISTORY = ROOT / "benchmarks" / "history"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *HISTORY.glob("*.md"),
        *ROOT.glob("plugins/*/*.md"),
        *EXAMPLES.glob("*.md"),
        *EXAMPLES.glob("*/*.md"),
    ]
)
TODAY = [page for page in PAGES if page.name not in ("CHANGELOG.md", "api.md") and page.parent != HISTORY]
"""Pages about what is, not what was; the reference is made of docstrings, which have tests of their own."""

page_of_today = pytest.mark.parametrize("page", TODAY, ids=lambda p: str(p.relative_to(ROOT)))


def code(page: Path) -> str:
    """Fenced blocks and code in sentences, one a line."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return "\n".join([*blocks, *(" ".join(span.split()) for span in spans)])


def python_blocks(page: Path) -> list[str]:
    """Python examples of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def first_column(text: str) -> list[str]:
    """Names in the first column of every table of ``text``; a cell may have several."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def anchors(page: Path) -> set[str]:
    """Where links may point to within a page, as GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_library_example_finds_its_stray_write(capsys, logs):
    """The library quickstart runs as printed and reports exactly the stray write it makes."""
    (example,) = python_blocks(ROOT / "README.md")
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "1 slot with wrong bytes\n"
    (finding,) = (e for e in logs if e["event"] == "incident")
    assert (finding["kind"], finding["slot"], finding["source"]) == ("bytes", 5, "k.0")


def test_readme_is_short():
    """README.md is read in one go."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_evidence_is_short():
    """docs/evidence.md has what holds, and the table of blindness; the sittings before are in benchmarks/history."""
    text = (DOCS / "evidence.md").read_text()
    assert len(text.splitlines()) <= 300
    assert "\n## Blindness" in text


@page_of_today
def test_python_examples_parse(page):
    """No example has a typing error."""
    for example in python_blocks(page):
        ast.parse(example)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Each relative link names a file that exists, and a heading in it."""
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("folder", [DOCS, HISTORY], ids=lambda f: f.name)
def test_every_page_is_in_the_index(folder):
    """A folder's README.md leads to each of its pages."""
    index = folder / "README.md"
    named = {(folder / t).resolve() for t in re.findall(r"\]\(([^)#\s]+)", index.read_text())}
    assert [str(p.relative_to(ROOT)) for p in sorted(folder.rglob("*.md")) if p != index and p not in named] == []


@page_of_today
def test_make_targets_exist(page):
    """Every ``make`` target that a page names is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code(page)))
    assert [t for t in sorted(named) if not re.search(rf"^{t}:", makefile, re.M)] == []


@page_of_today
def test_commands_exist(page):
    """Every subcommand of ``canary`` that a page names exists."""
    named = set(re.findall(r"(?:^|\s)canary ([a-z]+(?:-[a-z]+)*)", code(page), re.M))
    assert sorted(named - set(get_command(app).commands)) == []


@page_of_today
def test_variables_are_settings(page):
    """Every ``CANARY_*`` variable that a page names is a setting; a plugin's `CANARY_PROTOCOL` is none."""
    named = set(re.findall(r"(?<![A-Z_])CANARY_[A-Z_]*[A-Z]", page.read_text())) - {"CANARY_PROTOCOL"}
    assert sorted(named - {s.variable for s in settings(CanaryConfig())}) == []


@page_of_today
def test_public_names_exist(page):
    """Every hook, every public name, and every call of `Step` and `SlotEvents` that a page names exists."""
    text = code(page)
    packages = "core|adapters|desk|kit|sglang|transformers|vllm|myengine|toy|mini_infer|findings_file"
    hooks = set(re.findall(rf"\bcanary_(?!{packages})\w+", text))
    assert sorted(h for h in hooks if not hasattr(hookspecs, h)) == []
    names = set(re.findall(r"\bcanary_core\.([A-Za-z]\w*)", text)) - {"testing", "hookspecs"}
    assert sorted(names - set(canary_core.__all__)) == []
    methods = set(re.findall(r"\bcanary\.([a-z]\w*)\(", text))
    assert sorted(m for m in methods if not hasattr(canary_core.Canary, m)) == []
    for owner, name in set(re.findall(r"\b(step|slots)\.([a-z]\w*)(?=\()", text)):
        holder = canary_core.Step if owner == "step" else SlotEvents
        assert hasattr(holder, name), f"{owner}.{name}"


def test_settings_are_those_of_the_command(monkeypatch):
    """The table of docs/settings.md is what ``canary config --markdown`` prints; on failure, paste that there."""
    for setting in settings(CanaryConfig()):
        monkeypatch.delenv(setting.variable, raising=False)
    text = (DOCS / "settings.md").read_text()
    (table,) = re.findall(r"<!-- settings -->\n(.*?)<!-- /settings -->", text, re.S)
    assert table == CliRunner().invoke(app, ["config", "--markdown"]).output
    faults = [name for name in first_column(text.partition("## Faults")[2]) if name in FAULTS]
    assert faults == list(FAULTS)


def test_exit_codes_are_those_of_the_help():
    """docs/settings.md and ``canary --help`` have the same table of exit codes."""
    table = re.findall(r"^\| `(\d)` \| (.+) \|$", (DOCS / "settings.md").read_text(), re.M)
    assert {int(number): meaning for number, meaning in table} == EXIT_CODES
    shown = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output.split())
    assert all(f"{number} {meaning}" in shown for number, meaning in EXIT_CODES.items())


@pytest.mark.parametrize("page", pages.PARTS)
def test_pages_say_of_kinds_what_their_files_say(page):
    """Sections and tables of kinds are made from ``canary_core/kinds``; ``PYTHONPATH=src:tests python -m
    support.pages`` writes them anew."""
    assert (ROOT / page).read_text() == pages.text(page)


def test_every_kind_is_on_every_page():
    """A section that says what it means, what usually causes it, and what to do; and a row of each table."""
    sections = re.split(r"^## ", pages.sections(), flags=re.M)[1:]
    assert [section.partition("\n")[0] for section in sections] == [kind.name.lower() for kind in Kind]
    for part in ("**What it means.** ", "**Usual causes.** ", "**What to do next.** "):
        assert [section for section in sections if not section.partition(part)[2].strip()] == []
    for table in (pages.what_it_finds(), pages.consequences(), pages.remedies()):
        assert {kind.name.lower() for kind in Kind} <= set(re.findall(r"`(\w+)`", table))


def test_the_table_of_diagnoses_is_that_of_the_runs():
    """docs/incidents.md shows docs/confusion.json: at least 16 classes on each engine, the first diagnosis right in
    nine of ten, and none that is certain and wrong."""
    outcomes = [json.loads(line) for line in confusion.DATA.read_text().splitlines()]
    assert confusion.table(outcomes) in (DOCS / "incidents.md").read_text()
    for engine in {o["engine"] for o in outcomes}:
        own = [o for o in outcomes if o["engine"] == engine]
        assert len({name for o in own for name in o["right"]}) >= 16
        assert sum(o["first"] in o["right"] for o in own) >= 0.9 * len(own)
        assert [o for o in own if o["first"] not in o["right"] and o["sure"] == "certain"] == []


def test_every_event_is_listed():
    """docs/events.md has each event of `Event`'s table, and none that nothing tells."""
    told = first_column(re.sub(r"^ +", "", (DOCS / "events.md").read_text()).partition("## The counters")[0])
    known = re.findall(r"^ +\| (\w+) +\|", Event.__doc__ or "", re.M)
    assert sorted(set(known) - {"name"} - set(told)) == []
    assert len(told) == len(set(told))
    sources = "".join(f.read_text() for f in (*ROOT.glob("src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")))
    assert [name for name in told if f'"{name}"' not in sources] == []


@pytest.mark.parametrize("engine", ["sglang", "transformers"])
def test_supported_versions_are_those_of_the_package(engine):
    """A plugin's README and the project's name the range that its package accepts."""
    plugin = ROOT / "plugins" / f"canary-{engine}"
    found = re.search(rf'"{engine}>=([\d.]+),<([\d.]+)"', plugin.joinpath("pyproject.toml").read_text())
    assert found
    head, _, last = found[2].rpartition(".")
    supported = f"{found[1]} to {head}.{int(last) - 1}"
    for page in (plugin / "README.md", ROOT / "README.md"):
        assert supported in page.read_text(), f"{page} does not say {supported}"
