"""Streams and events for asynchronous batching without a GPU: everything is done when it is issued."""

import importlib
from typing import Any

import pytest
import torch


class Instant:
    """A stream or event on which everything has happened."""

    def record_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def run_asynchronous_batches_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes asynchronous batching run without a GPU. Skips the test where the release makes CUDA streams by name."""
    outputs = importlib.import_module("transformers.generation.continuous_batching.input_outputs")
    if not hasattr(outputs, "create_device_stream"):
        pytest.skip("this release makes CUDA streams by name")
    monkeypatch.setattr(outputs.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",))
    monkeypatch.setattr(torch.cpu, "is_available", lambda: True, raising=False)
    monkeypatch.setattr(outputs, "create_device_stream", lambda device: Instant())
    monkeypatch.setattr(torch, "Event", lambda *args, **kwargs: Instant())
