"""`FaultSpec`: one fault to inject, from text."""

from dataclasses import dataclass, fields

from canary_core.errors import ConfigError
from canary_core.faults.catalogue import FAULTS


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One fault to inject.

    ``probability`` per forward, after ``warmup`` forwards; ``count`` injections in all, 0 for no limit. ``region`` and
    ``source`` (``half.layer``, e.g. ``v.3``) aim it, ``rank`` at one of several processes that serve a model; None for
    any.
    """

    fault: str
    probability: float = 1.0
    warmup: int = 0
    count: int = 1
    region: str | None = None
    source: str | None = None
    rank: int | None = None

    @classmethod
    def parse(cls, text: str) -> "FaultSpec":
        """``name`` or ``name:key=value,...``. Raises `ConfigError`."""
        name, _, rest = text.partition(":")
        name = name.strip()
        if name not in FAULTS:
            raise ConfigError(f"CANARY_FAULTS: unknown fault {name!r}; the faults are {', '.join(FAULTS)}")
        known = [f.name for f in fields(cls) if f.name != "fault"]
        values: dict[str, str] = {}
        for pair in filter(None, (p.strip() for p in rest.split(","))):
            key, equals, value = (part.strip() for part in pair.partition("="))
            if key not in known or not equals or not value:
                raise ConfigError(
                    f"CANARY_FAULTS: {name} has {pair!r}; write key=value with a key of {', '.join(known)}"
                )
            if key in values:
                raise ConfigError(f"CANARY_FAULTS: {name} has {key} twice; give it once, or the fault twice")
            values[key] = value
        spec = cls(
            name,
            _number(name, "probability", values, 1.0),
            int(_number(name, "warmup", values, 0)),
            int(_number(name, "count", values, 1)),
            values.get("region"),
            values.get("source"),
            int(_number(name, "rank", values, 0)) if "rank" in values else None,
        )
        if spec.probability > 1:
            raise ConfigError(f"CANARY_FAULTS: {name} has probability={spec.probability:g}; it must be 0 to 1")
        return spec


def _number(fault: str, key: str, values: dict[str, str], default: float) -> float:
    if key not in values:
        return default
    whole = key != "probability"
    try:
        number = int(values[key]) if whole else float(values[key])
    except ValueError:
        number = -1
    if not number >= 0:
        raise ConfigError(
            f"CANARY_FAULTS: {fault} has {key}={values[key]}; it must be "
            f"{'a whole number of at least 0' if whole else 'a number from 0 to 1'}"
        )
    return number
