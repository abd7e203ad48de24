"""Bugs of an engine run where the engine is installed."""

from pathlib import Path

import pytest

from bugs.museum import ENGINES, installed

HERE = Path(__file__).parent
TARGETS = {"sglang": "make test-sglang", "transformers": "make test", "vllm": "make test-vllm"}


def pytest_configure(config: pytest.Config) -> None:
    """Markers that canary-sglang's tests have, too."""
    config.addinivalue_line("markers", "beyond_ci(covered_by): CI has no time for it")
    config.addinivalue_line("markers", "older_release: CI runs it on an older release, too")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips an engine's bugs elsewhere. Engines, and what they import, warn of things that are not ours."""
    for engine in ENGINES:
        here = installed(engine) is not None
        for item in items:
            if HERE / engine not in item.path.parents:
                continue
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not here:
                item.add_marker(pytest.mark.skip(reason=f"{engine} is not installed; {TARGETS[engine]} has it"))
