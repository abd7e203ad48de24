from importlib.util import find_spec
from pathlib import Path

import pytest

MARKERS = (
    "without_engine: runs where vLLM is not installed, too",
    "older_release: CI runs it on an older vLLM, too",
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
