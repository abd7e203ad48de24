"""`unheard`: keeps what built-in reporting would log from the terminal."""

import contextlib
from collections.abc import Iterator

import structlog


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Drops what built-in reporting would log: what is found within is expected, and told by whoever asks for it."""
    configured, before = structlog.is_configured(), structlog.get_config()
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        structlog.configure(**before) if configured else structlog.reset_defaults()


def _drop(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    raise structlog.DropEvent
