"""Every error Canary raises on purpose. Each message says what, what was got, and what to do."""


class CanaryError(Exception):
    """Base of all of Canary's own errors."""


class ConfigError(CanaryError, ValueError):
    """A setting has a value that Canary can't use. A `ValueError` too, so that pydantic collects it with others."""


class PluginError(CanaryError):
    """A plugin is missing, broken, or doesn't fit the engine it is for."""


class AttachError(CanaryError):
    """A pool, source, table or batch does not fit its description, or a batch not the pool that was attached to."""


class MisuseError(CanaryError):
    """Canary was called in an order, or with arguments, that can't be right; raised in `raise` mode only."""


class ViolationError(CanaryError):
    """The KV cache isn't what it should be; raised in `raise` mode only.

    ``incident`` is the first one (`canary_core.Incident`): all that was found with it, of the same cause.
    ``violation`` is its root (`canary_core.Violation`).
    """

    def __init__(self, violation: object, incident: object = None) -> None:
        super().__init__(str(violation if incident is None else incident))
        self.violation = violation
        self.incident = incident


class MetricsError(CanaryError):
    """Metrics can't be had where they were asked for."""


class ControlError(CanaryError):
    """The control socket can't be made, or nobody answers at it, or what was asked is refused."""


def error_text(error: BaseException) -> str:
    """``KeyError: 'forward'``: an exception in a sentence."""
    return f"{type(error).__name__}: {error}"
