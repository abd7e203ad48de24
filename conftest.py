"""For all tests of the project, the plugins' included: where there is no GPU, Triton runs in its interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, so it must be set before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """GPU machines may have pytest without its plugins; then ``timeout`` is a marker that does nothing."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): most time for a test, where pytest-timeout is installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, torch.cuda.is_available() is False"))
