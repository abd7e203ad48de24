"""For all tests of the project, the plugins' included: where there is no GPU, Triton runs in its interpreter."""

import os
from collections import Counter
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from support import turns

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, so it must be set before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def full_budget() -> None:
    """Findings of one test are not fewer because another had many: the budget is the process's."""
    import_module("canary_core.guard.reporting.budget").PROCESS.fill()


def pytest_configure(config: pytest.Config) -> None:
    """The marker of `turns`. GPU machines may have pytest without its plugins; then ``timeout`` is a marker that does
    nothing."""
    config.addinivalue_line("markers", turns.MARKER)
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): most time for a test, where pytest-timeout is installed")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Skips tests marked ``gpu`` where there is none. Of those that are selected in the end, leaves out those whose
    turn it isn't, where ``CI_TURN`` asks for one turn; see `turns`."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, torch.cuda.is_available() is False"))
    yield
    if turn := os.environ.get("CI_TURN"):
        kept = turns.those_of(items, int(turn))
        config.hook.pytest_deselected(items=[*set(items).difference(kept)])
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A run of GPU tests (``-m gpu``) says at its end what was skipped, grouped by reason."""
    if config.option.markexpr != "gpu":
        return
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in skipped)
    terminalreporter.section(f"{len(skipped)} skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason.removeprefix('Skipped: ')}")
