"""Fixtures of the core's tests."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from support.guarded import Guarded
from support.interpreter import hasten

from canary_core.guard import canary
from canary_core.plugins import hook_manager
from canary_core.testing import Findings
from canary_desk.incidents import investigator

MakeDistribution = Callable[..., None]

hasten()


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Canary that a test leaves behind without a forward does not tell another test, a minute later, that it hears
    nothing. Tests of silence ask for it."""
    monkeypatch.setenv("CANARY_SILENCE_S", "0")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Incidents of a test are diagnosed while pytest still keeps its output: between its phases nobody does, and the
    thread would write to the terminal."""
    try:
        return (yield)
    finally:
        for one in tuple(investigator._running):
            one.wait(0.5)  # a test may have stopped the thread on purpose


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """A Canary that a test has made ends with the test, as with an engine: its summary and its diagnoses are in the
    output that pytest keeps of the test, and not on the terminal when the process ends. One that a wider fixture made
    stays open."""
    before = set(canary._open)
    yield
    for left in set(canary._open) - before:
        with contextlib.suppress(Exception):  # the test may have broken it on purpose, or it raises what it found
            left.close()


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDistribution]:
    """Installs tiny real distributions (modules and a dist-info folder on sys.path) for one test."""
    before = set(sys.modules)

    def make(
        name: str, modules: Mapping[str, str], points: Mapping[str, str] | None = None, version: str = "1.0"
    ) -> None:
        site = tmp_path / name  # a folder each, since importlib.metadata caches what a folder holds
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{point} = {module}" for point, module in (points or {}).items()]
        info.joinpath("entry_points.txt").write_text("\n".join(["[canary]", *lines, ""]))
        for module, source in modules.items():
            site.joinpath(f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))

    yield make
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process-wide plugins as they are at start: none loaded."""
    monkeypatch.setattr("canary_core.plugins.process._process", None)


@pytest.fixture
def findings() -> Iterator[Findings]:
    """Everything that the plugins of this process are told during the test."""
    collected = Findings()
    hook_manager().register(collected)
    yield collected
    hook_manager().unregister(collected)


@pytest.fixture
def guarded() -> Guarded:
    """A toy engine under a Canary of its own, and all that was told of it."""
    return Guarded()


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """Everything reported through structlog during the test, as dicts."""
    with capture_logs() as entries:
        yield entries
    structlog.reset_defaults()
