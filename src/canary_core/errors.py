"""Errors raised by Canary on purpose. Each message says the problem, the value, and the remedy."""


class CanaryError(Exception):
    """Base of all of Canary's own errors."""


class ConfigError(CanaryError, ValueError):
    """A setting has an unusable value. A `ValueError` too, so that pydantic collects it with others."""


class PluginError(CanaryError):
    """A plugin is missing, broken, or doesn't fit its engine."""


class AttachError(CanaryError):
    """A pool, source, table or batch does not fit its description, or a batch not the attached pool."""


class MisuseError(CanaryError):
    """Canary was called in an impossible order, or with impossible arguments; raised in `raise` mode only."""


class ViolationError(CanaryError):
    """The KV cache is corrupted; raised in `raise` mode only.

    ``incident`` is the first incident (`canary_core.Incident`): all findings of the same cause. ``violation`` is its
    root (`canary_core.Violation`).
    """

    def __init__(self, violation: object, incident: object = None) -> None:
        super().__init__(str(violation if incident is None else incident))
        self.violation = violation
        self.incident = incident


class MetricsError(CanaryError):
    """Metrics can't be exported at the requested place."""


class ControlError(CanaryError):
    """The control socket can't be made, nobody answers there, or the request is refused."""


def error_text(error: BaseException) -> str:
    """``KeyError: 'forward'``: an exception in a sentence."""
    return f"{type(error).__name__}: {error}"
