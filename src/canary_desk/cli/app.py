"""The ``canary`` command."""

import json
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Column, Table

import canary_core
from canary_core import plugins
from canary_core.config import CanaryConfig
from canary_core.config.shown import settings
from canary_core.errors import CanaryError, ConfigError, ViolationError
from canary_desk.cli import check_plugin, control, doctor, program
from canary_desk.cli.common import AsJson, load_config, print_json, refusal, refusing
from canary_desk.cli.coverage_log import CoverageLog
from canary_desk.cli.demo_screen import Screen
from canary_desk.cli.explain import explain
from canary_desk.cli.fleet import fleet
from canary_desk.cli.outcome import FOUND, RunOutcome
from canary_kit import demo, scaffold
from canary_kit.conformance import suite_tests

EXIT_CODES = {
    0: "It worked.",
    1: "The answer is no: a fault was not found, the log does not say what is guarded.",
    2: "It can't be done: a bad setting or argument, a plugin that is not installed, no such file.",
}
"""Exit codes of every command, except `canary run`, which returns the started program's."""

app = typer.Typer(
    name="canary",
    help="Canary guards the KV cache of an LLM engine.",
    # Paragraphs, since typer joins the lines of each.
    epilog="\n\n".join(
        [
            "Exit codes:",
            *(f"{code}  {meaning}" for code, meaning in EXIT_CODES.items()),
            "canary run gives the exit code of the program that it has started, or 66 where an incident counts.",
        ]
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"canary {canary_core.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Canary guards the KV cache of an LLM engine."""


app.add_typer(control.app, name="ctl")
app.command("top")(control.top)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain)
app.command("fleet")(fleet)


@app.command("plugins")
def show_plugins(as_json: AsJson = False) -> None:
    """List every installed plugin: where it is from, its hooks, the engine it found, and why it can't load. Exit code
    2 if CANARY_PLUGINS names one that is not installed."""
    config = load_config()
    found = plugins.installed()
    names = [p.name for p in found if not p.built_in]
    allowed = plugins.as_installed(config.plugins, names)
    missing = plugins.not_installed(allowed, names)
    if as_json:
        print_json([_plugin_fields(p, allowed) for p in (*found, *missing)])
    else:
        _print_plugins(found, allowed, config)
    for p in missing:
        typer.echo(f"canary: {p.error}", err=True)
    if missing:
        raise typer.Exit(2)


def _print_plugins(found: Iterable[plugins.Plugin], allowed: tuple[str, ...], config: CanaryConfig) -> None:
    table = _details_table("name", "version", "allowed")
    for p in found:
        on = "yes" if _is_allowed(p, allowed) else "no"
        table.add_row(escape(p.name), escape(p.version or ""), on, _details(p, config))
    Console().print(table)


@app.command("config")
def show_config(
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the documentation.")] = False,
) -> None:
    """List every setting: its values or unit, its default, what it is now where that differs, and what it does."""
    config = load_config()
    plugins.tell_unknown_settings(config)
    found = settings(config)
    if as_json:
        print_json([asdict(s) for s in found])
        return
    if as_markdown:
        typer.echo("| variable | values | default | what it does |\n|---|---|---|---|")
        for s in found:
            default = f"`{s.default}`" if s.default else "empty"
            typer.echo(f"| `{s.variable}` | {s.values} | {default} | {s.description} |")
        return
    table = _details_table("variable")
    for s in found:
        now = s.value if s.value != s.default else None
        about = _lines({"now": now, "default": s.default or "empty", "values": s.values, "what": s.description})
        table.add_row(s.variable, about)
    Console().print(table)


@app.command("coverage")
def show_coverage(
    log: Annotated[
        typer.FileText,
        typer.Argument(help="An engine's log, written with CANARY_LOG_FORMAT=json; - for stdin.", errors="replace"),
    ],
    as_json: AsJson = False,
) -> None:
    """Show what share of an engine's KV bytes is guarded, by its log. Exit code 1 if the log doesn't say, or says
    that Canary was disabled."""
    found = CoverageLog.read(log)
    events = list(found.coverage.values())
    if as_json:
        print_json(events)
    elif events:
        _print_coverage(events)
    if found.problem is not None:
        typer.echo(f"canary: {log.name}: {found.problem}", err=True)
        raise typer.Exit(1)


def _print_coverage(events: Iterable[dict[str, Any]]) -> None:
    table = _table("model", "part", "guarded as", "size", "layers, or why not")
    for event in events:
        model = event.get("model") or ""
        share = event["summary"].partition(";")[0]
        _add(table, model, "all", "", decimal(event["guarded_bytes"]), share)
        for name, r in event.get("regions", {}).items():
            layers = ", ".join(f"{half} x {count}" for half, count in r["sources"].items())
            _add(table, model, name, r["kind"], decimal(r["bytes"]), layers)
        for item in event["uncovered"]:
            _add(table, model, item["name"], "not", decimal(item["bytes"]), item["reason"])
    Console().print(table)


# What follows the script's name belongs to the script, dashes and all.
@app.command("run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run_script(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Passed on to it.")] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as for python -m.")] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write the incidents as a JUnit report to this file.")
    ] = None,
) -> None:
    """Run a Python program under the plugins that CANARY_PLUGINS names, for engines that load no plugins themselves.
    The exit code is the program's; 2 if it can't be started; 66 if there was an incident in raise mode or with the
    profile ci, unless its signature is suppressed (CANARY_SUPPRESSIONS)."""
    config = load_config()
    if not is_module:
        with refusing():
            program.require_file(script)
    plugins.tell_unknown_settings(config)
    if not config.plugins:
        if config.mode == "raise":
            raise refusal(
                ConfigError(
                    "CANARY_MODE=raise, but CANARY_PLUGINS is empty, so nothing would be guarded; name the engine's "
                    "plugin in it (canary plugins lists them)"
                )
            )
        typer.echo("canary: CANARY_PLUGINS is empty, so nothing is guarded; name the engine's plugin in it", err=True)
    try:
        plugins.start(config)
    except CanaryError as error:
        raise typer.Exit(2) from error  # `start` has reported it
    outcome, code, ended = RunOutcome(config), 1, None
    plugins.process_manager().register(outcome)
    try:
        code = program.run(script, arguments or [], is_module)
    except program.ProgramError as error:
        raise refusal(error) from error
    except SystemExit as exit_of_program:
        ended = exit_of_program
    finally:
        late = _uninstall()
    try:
        outcome.tell(junit)
    except OSError as error:
        typer.echo(f"canary: no JUnit report: {error}", err=True)
    if outcome.fails or late:
        raise typer.Exit(FOUND)
    if ended is not None:
        raise ended
    raise typer.Exit(code)


@app.command("demo")
def demonstrate(
    seed: Annotated[int, typer.Option(help="Seed of weights, traffic and faults.")] = 0,
    requests: Annotated[int, typer.Option(min=8, help="Requests of clean traffic for each model.")] = 240,
    engine: Annotated[str | None, typer.Option(help="Only this engine's; else every installed one's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each model.")] = False,
) -> None:
    """Guard a real engine: clean traffic without an alarm, then every fault found. Exit code 1 if not, 2 if it can't
    run. Works whatever CANARY_PLUGINS says."""
    console = Console(stderr=as_json)
    with refusing():
        demos = [demo.Demo(e, model, seed, requests) for e in demo.engines(engine) for model in e.models]
        kept = Path(tempfile.mkdtemp(prefix="canary-demo-"))
        demos[:1] = [replace(each, incident_dir=str(kept)) for each in demos[:1]]
        reports = []
        with Screen(console, sum(d.total for d in demos)) as screen:
            for each in demos:
                reports.append(replace(each, progress=screen.progress).run())
                if as_json:
                    typer.echo(json.dumps(reports[-1].fields()))
                else:
                    screen.report(reports[-1])
    if not as_json:
        screen.summary(reports)
        for bundle in kept.iterdir():
            typer.echo(f"One of the faults, as an operator would read it: canary explain {bundle}")
    if not all(r.passed for r in reports):
        raise typer.Exit(1)


@app.command("check-plugin")
def check(
    name: Annotated[str, typer.Argument(help="The plugin's name, as canary plugins lists it.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="TEXT", help="Run only tests with this in their names.")
    ] = None,
    names: Annotated[bool, typer.Option("--list", help="Only print the tests' names, and run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each test.")] = False,
) -> None:
    """Run the conformance suite of a plugin: is each byte described, each flip named, each fault found, and the engine
    left as it was? Exit code 1 if a test failed, 2 if there is nothing to run. Works whatever CANARY_PLUGINS says."""
    with refusing():
        suite = check_plugin.suite_of(name)
        tests = check_plugin.chosen(suite_tests(suite), only or [])
    if names:
        typer.echo("\n".join(tests))
        return
    console = Console(stderr=as_json)
    outcomes = check_plugin.show(console, suite, tests)
    if as_json:
        for outcome in outcomes:
            typer.echo(json.dumps(outcome.fields()))
    console.print(f"{name}: {check_plugin.summary(outcomes)}")
    if any(outcome.result == "failed" for outcome in outcomes):
        raise typer.Exit(1)


@app.command("new-plugin")
def new_plugin(
    name: Annotated[str, typer.Argument(help="What the plugin is called, after its engine: lower-case, my_engine.")],
    into: Annotated[
        Path, typer.Option("--into", metavar="DIR", help="Where the new folder is made.", show_default="this folder")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write an installable plugin with its tests, for a toy paged engine that you replace by yours. Exit code 2 if it
    can't be written; nothing is overwritten."""
    with refusing():
        names = scaffold.Names(name)
        names.require_free()
        files = scaffold.write(names, into)
    if as_json:
        print_json({"plugin": name, "distribution": names.distribution, "files": [str(into / f) for f in files]})
        return
    folder = shlex.quote(str(into / names.distribution))
    typer.echo("\n".join(["Wrote", *(f"  {into / file}" for file in files)]))
    typer.echo(
        f"\nNext:\n"
        f"  cd {folder}\n"
        f"  pip install -e '.[test]'\n"
        f"  pytest\n"
        f"  canary check-plugin {name}\n"
        f"Then put your engine in the place of {names.package}/toy_engine.py; README.md says what to change."
    )


def main() -> None:
    """Entry point of the ``canary`` script."""
    app()


def _uninstall() -> bool:
    """Undoes the plugins; whether closing brought a finding in raise mode."""
    try:
        plugins.uninstall()
    except ViolationError as error:
        typer.echo(f"canary: ViolationError: {error}", err=True)
        return True
    return False


def _plugin_fields(plugin: plugins.Plugin, allowed: tuple[str, ...]) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "version": plugin.version,
        "distribution": plugin.distribution,
        "allowed": _is_allowed(plugin, allowed),
        "hooks": list(plugin.hooks),
        "protocol": plugin.protocol,
        "engine": asdict(plugin.engine) if plugin.engine else None,
        "warnings": list(plugin.warnings),
        "error": plugin.error,
    }


def _is_allowed(plugin: plugins.Plugin, allowed: tuple[str, ...]) -> bool:
    return plugin.built_in or plugin.name in allowed


def _details(plugin: plugins.Plugin, config: CanaryConfig) -> Table:
    """Origin of a plugin, protocol, engine and its fate, hooks, and problems."""
    undeclared = "none declared, taken as 1" if plugin.hooks else None
    details = {
        "from": plugin.distribution,
        "protocol": undeclared if plugin.protocol is None else str(plugin.protocol),
        "engine": plugin.engine.describe(config.untested) if plugin.engine else None,
        "hooks": ", ".join(plugin.hooks),
        "warning": "\n".join(plugin.warnings),
        "error": plugin.error,
    }
    return _lines(details)


def _details_table(*headers: str) -> Table:
    # What is long stands in lines of the last column, so that no name is cut to pieces on 80 columns.
    return Table(*(Column(h, no_wrap=True) for h in headers), Column("details", overflow="fold"), show_lines=True)


def _lines(details: Mapping[str, str | None]) -> Table:
    """A line for each non-empty one of ``details``."""
    lines = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 1))
    for name, text in details.items():
        if text:
            _add(lines, name, text)
    return lines


def _table(*headers: str) -> Table:
    # Folded, since a name that is cut off can't be searched for.
    return Table(*(Column(h, overflow="fold") for h in headers))


def _add(table: Table, *cells: str | None) -> None:
    # Escaped, since a message may quote brackets, which rich would take for markup.
    table.add_row(*(escape(c or "") for c in cells))
