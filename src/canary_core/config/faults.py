"""`FaultSpec`: one fault to inject, parsed from text. Imports no torch, for `CanaryConfig`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from canary_core.errors import ConfigError

FaultName = Literal[
    "req_to_token",
    "real_kv_used",
    "real_kv_unused_cache",
    "real_kv_post_forward",
    "lost_write",
    "stray_write",
    "swap_pages",
    "next_token_swap",
]
"""Every fault, in the order of `FAULTS`, with descriptions there."""


class FaultSpec(BaseModel, frozen=True, extra="forbid"):
    """One fault to inject.

    ``probability`` per forward, after ``warmup`` forwards; ``count`` injections in all, 0 for no limit. Targets, None
    for any: ``region`` and ``source`` (``half.layer``, e.g. ``v.3``), ``rank`` among the processes of a model,
    ``replica`` among data-parallel engines.
    """

    fault: FaultName
    probability: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    warmup: NonNegativeInt = 0
    count: NonNegativeInt = 1
    region: str | None = None
    source: str | None = None
    rank: NonNegativeInt | None = None
    replica: NonNegativeInt | None = None

    @classmethod
    def parse(cls, text: str) -> "FaultSpec":
        """``name`` or ``name:key=value,...``. Raises `ConfigError`."""
        name, _, rest = (part.strip() for part in text.partition(":"))
        keys = [key for key in cls.model_fields if key != "fault"]
        values: dict[str, str] = {}
        for pair in filter(None, (p.strip() for p in rest.split(","))):
            key, _, value = (part.strip() for part in pair.partition("="))
            if key not in keys or not value:
                raise ConfigError(
                    f"CANARY_FAULTS: {name} has {pair!r}; write key=value with a key of {', '.join(keys)}"
                )
            if key in values:
                raise ConfigError(f"CANARY_FAULTS: {name} has {key} twice; give it once, or the fault twice")
            values[key] = value
        try:
            return cls.model_validate({"fault": name, **values})
        except ValidationError as error:
            raise ConfigError("; ".join(_sentence(name, problem) for problem in error.errors())) from error

    @classmethod
    def parse_all(cls, text: str) -> "list[FaultSpec]":
        """The faults of ``CANARY_FAULTS``, separated by semicolons. Raises `ConfigError`."""
        return [cls.parse(part) for part in text.split(";") if part.strip()]


def _sentence(fault: str, problem: Mapping[str, Any]) -> str:
    """One entry of pydantic's report as a sentence, with the fault's name, the key and its value."""
    (key,) = problem["loc"]
    if key == "fault":
        return f"CANARY_FAULTS: unknown fault {fault!r}; the faults are {', '.join(get_args(FaultName))}"
    return f"CANARY_FAULTS: {fault} has {key}={problem['input']}: {problem['msg']}"


def readable_faults(text: str) -> str:
    """``text``, for a field of settings. Raises `ConfigError` where it is no list of faults."""
    FaultSpec.parse_all(text)
    return text
