from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from vllm_on_cpu.params import shared_engine
from vllm_on_cpu.setups import SETUPS, Setup

MARKERS = (
    "without_engine: runs where vLLM is not installed, too",
    "older_release: CI runs it on an older vLLM, too",
    "beyond_ci(covered_by): CI has no time for it",
)


def pytest_configure(config: pytest.Config) -> None:
    """Our markers."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run vLLM are skipped where it isn't installed. It and what it imports warn of things that are not
    ours."""
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents or item.get_closest_marker("without_engine") is not None:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vllm is not installed; make test-vllm makes a place for it"))


@dataclass(frozen=True)
class Shared:
    """An engine that tests share, by its `Setup`."""

    setup: Setup
    small: Any


@cache
def shared(name: str) -> Shared:
    """Never given up: vLLM could not make another one in this process."""
    from vllm_on_cpu.engine import SmallEngine

    setup = SETUPS[name]
    return Shared(setup, SmallEngine(setup.model, **setup.options))


@pytest.fixture(scope="session", params=[shared_engine(name) for name in SETUPS])
def engine(request: pytest.FixtureRequest) -> Shared:
    """One engine of each of `SETUPS`, loaded once a process; each guard gives it a new KV cache."""
    return shared(request.param)


@pytest.fixture
def another() -> Shared:
    """A second engine beside the first, with asynchronous scheduling: both of process 0."""
    return shared("async")
