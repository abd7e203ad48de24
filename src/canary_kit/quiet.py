"""Contexts for tests and demos of small engines: `unheard`, `one_thread`."""

import contextlib
from collections.abc import Iterator

import structlog
import torch


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Drops the log of built-in reporting: findings within are expected, and shown by the caller."""
    configured, before = structlog.is_configured(), structlog.get_config()
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        structlog.configure(**before) if configured else structlog.reset_defaults()


def _drop(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    raise structlog.DropEvent


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch: tiny tensors gain nothing from more, which on a busy machine only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
