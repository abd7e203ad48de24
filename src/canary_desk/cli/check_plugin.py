"""``canary check-plugin``: runs a plugin's conformance suite, and shows the results."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape

from canary_core import plugins
from canary_core.errors import PluginError
from canary_kit.conformance import Outcome, PluginConformance, run_suite

_MARKS = {"passed": "[green]passed[/green]", "failed": "[red]FAILED[/red]", "undeclared": "[dim]undeclared[/dim]"}


def suite_of(name: str) -> type[PluginConformance]:
    """The suite of the installed plugin ``name``, whatever ``CANARY_PLUGINS`` says. Raises `PluginError`, saying why,
    where there is none."""
    known = {p.name: p for p in plugins.installed() if not p.built_in}
    plugin = known.get(name)
    if plugin is None:
        raise PluginError(
            f"there is no plugin {name!r}; installed plugins: {', '.join(sorted(known)) or 'none'}. Install its "
            "distribution (pip install -e PATH), or correct the name"
        )
    reason = plugin.error or plugins.refusal(plugin)
    if reason is not None:
        raise PluginError(f"plugin {name!r} can't be checked: {reason}")
    if "canary_conformance" not in plugin.hooks:
        raise PluginError(
            f"plugin {name!r} offers no conformance suite: implement the hook canary_conformance, which gives a "
            "subclass of canary_core.testing.PluginConformance"
        )
    manager = plugins.Plugins().manager
    manager.register(plugin.target, name=name)
    (suite,) = manager.hook.canary_conformance()
    if not (isinstance(suite, type) and issubclass(suite, PluginConformance)):
        raise PluginError(
            f"canary_conformance of plugin {name!r} must give a subclass of canary_core.testing.PluginConformance, got "
            f"{suite!r}"
        )
    return suite


def chosen(tests: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """The ``tests`` with one of ``wanted`` in the name; all without ``wanted``. Raises `PluginError` for one found in
    no name."""
    tests = list(tests)
    for part in wanted:
        if not any(part in test for test in tests):
            raise PluginError(f"no test of the suite has {part!r} in its name; the tests are {', '.join(tests)}")
    return [test for test in tests if not wanted or any(part in test for part in wanted)]


def show(console: Console, suite: type[PluginConformance], tests: Sequence[str]) -> list[Outcome]:
    """Runs ``tests``, a line each when done; below it the test's name and the problem, or why nothing was tried."""
    outcomes = []
    with console.status("") as status:
        for outcome in run_suite(suite, tests, lambda what: status.update(escape(what))):
            outcomes.append(outcome)
            console.print(f"{_MARKS[outcome.result]:<28} {escape(outcome.what)} [dim]({outcome.seconds:.1f} s)[/dim]")
            if outcome.result == "failed":
                console.print(f"    [dim]{outcome.test}[/dim]", highlight=False)
                console.print(f"    {escape(outcome.message)}", highlight=False, style="bold")
            if outcome.result == "undeclared":
                console.print(f"    [dim]{escape(outcome.message)}[/dim]", highlight=False)
            if outcome.error is not None:
                console.print(f"[dim]{escape(outcome.error)}[/dim]", highlight=False)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    """Numbers of passed and failed tests, and of tests for undeclared abilities."""
    number = {result: sum(o.result == result for o in outcomes) for result in _MARKS}
    parts = [f"{number['passed']} passed"]
    parts += [f"{number[result]} {result}" for result in ("failed", "undeclared") if number[result]]
    return ", ".join(parts)
