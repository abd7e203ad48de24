"""Settings for users: the table of ``canary config``, and unknown variables of the environment."""

import difflib
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize
from pydantic_settings import EnvSettingsSource

from canary_core.config.config import CanaryConfig
from canary_core.config.values import BYTE_SIZE


def unknown_variables() -> dict[str, str | None]:
    """Environment variables with the prefix ``CANARY_`` but no setting, each with the setting of the nearest name; None
    where none is near. Empty variables count as unset."""
    known = [name.upper() for name in CanaryConfig.model_fields]
    # The source that pydantic-settings itself reads: it gives all variables, with names in lower case.
    given = (name.upper() for name in EnvSettingsSource(CanaryConfig).env_vars)
    names = (name.removeprefix("CANARY_") for name in given if name.startswith("CANARY_"))
    near = {name: difflib.get_close_matches(name, known, n=1) for name in names if name not in known}
    return {f"CANARY_{name}": f"CANARY_{found[0]}" if found else None for name, found in near.items()}


def shares_metrics() -> bool:
    """Whether prometheus_client's processes share metrics, by the engine's choice: no setting of Canary's."""
    return bool(variable_of_others("PROMETHEUS_MULTIPROC_DIR"))


def variable_of_others(name: str) -> str | None:
    """An environment variable of an engine or a library; None where unset."""
    return EnvSettingsSource(CanaryConfig, env_ignore_empty=False).env_vars.get(name.lower())


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting for users. ``values`` lists the choices or names the unit; ``value`` is the current one."""

    variable: str
    values: str
    default: str
    value: str
    description: str


def settings(config: CanaryConfig) -> list[Setting]:
    """Every setting with its value in ``config``, in the order of the fields."""
    return [
        Setting(
            variable=f"CANARY_{name.upper()}",
            values=_values(info.annotation, info.json_schema_extra),
            default=_shown(info.default),
            value=_shown(getattr(config, name)),
            description=info.description or "",
        )
        for name, info in CanaryConfig.model_fields.items()
    ]


def _values(annotation: Any, extra: Any) -> str:
    if extra:
        return str(extra["unit"])
    if get_origin(annotation) is Literal:
        return ", ".join(get_args(annotation))
    return {bool: "true, false", int: "integer"}.get(annotation, "text")


def _shown(value: object) -> str:
    """The value as written in the environment."""
    if isinstance(value, tuple):
        return ",".join(value)
    if value is None:
        return ""
    if isinstance(value, ByteSize):
        text = value.human_readable(separator="")
        return text.replace(".0", "") if BYTE_SIZE.validate_python(text) == value else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
