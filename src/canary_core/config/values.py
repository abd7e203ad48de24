"""Values of settings beyond numbers and words: `ScrubBudget`, `RecomputeShare`, `LayerShare`, `MemoryShare` and
`ListenAddress`, their types as settings; and the sentence about those that can't be used."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ByteSize, PlainSerializer, TypeAdapter, ValidationError
from pydantic_settings import NoDecode

from canary_core.errors import ConfigError

BYTE_SIZE = TypeAdapter(ByteSize)
"""Parses sizes such as ``64MiB``."""
MOST_BYTES = (1 << 63) - 1

Untested = Literal["guard", "refuse"]
Value = TypeVar("Value", bound="AsWritten")


class AsWritten:
    """A value that prints as written."""

    __slots__ = ()
    text: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls: type[Value], value: object) -> Value:
        """By `read`, unless it is one. Raises `ConfigError`."""
        return value if isinstance(value, cls) else cls.read(str(value).strip(), value)

    @classmethod
    def read(cls: type[Value], text: str, value: object) -> Value:
        """From ``text``, given as ``value``. Raises `ConfigError`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ScrubBudget(AsWritten):
    """Work allowed to the scrub: either a ``share`` of the time (0 to 1) or ``step_bytes`` after each forward."""

    share: float | None = None
    step_bytes: int = 0
    text: str = field(default="0", compare=False)

    @classmethod
    def read(cls, text: str, value: object) -> "ScrubBudget":
        """From ``1%``, ``64MiB`` (units of `pydantic.ByteSize`), ``4096`` (bytes) or ``0``. Raises `ConfigError`."""
        # All of the text, since ByteSize takes what comes first in it and lets the rest go.
        written = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|\w*)", text)
        number, unit = written.groups() if written else ("", "")
        if unit == "%":
            if float(number) > 100:
                raise ConfigError(f"CANARY_SCRUB_BUDGET must be at most 100%, got {value!r}")
            return cls(share=float(number) / 100, text=text)
        try:
            step_bytes: int = BYTE_SIZE.validate_python(number + unit)
        except ValidationError as error:
            raise ConfigError(
                "CANARY_SCRUB_BUDGET must be a share of time such as 1% or bytes per forward such as 64MiB, got "
                f"{value!r}"
            ) from error
        except OverflowError:  # more than a float holds
            step_bytes = MOST_BYTES + 1
        if step_bytes > MOST_BYTES:
            raise ConfigError(f"CANARY_SCRUB_BUDGET must be below 8EiB per forward, got {value!r}")
        return cls(step_bytes=step_bytes, text=text)


@dataclass(frozen=True, slots=True)
class RecomputeShare(AsWritten):
    """Requests computed again: either a ``share`` of the time (0 to 1), or so many ``verdicts`` and no more."""

    share: float = 0.0
    verdicts: int = 0
    text: str = field(default="0", compare=False)

    @classmethod
    def read(cls, text: str, value: object) -> "RecomputeShare":
        """From ``1%``, ``8`` (verdicts) or ``0``. Raises `ConfigError`."""
        written = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s*%|(\d{1,9})", text)
        if written is None or (written[1] and float(written[1]) > 100):
            raise ConfigError(
                "CANARY_RECOMPUTE must be a share of time such as 1%, at most 100%, or a number of verdicts such as 8, "
                f"got {value!r}"
            )
        return cls(float(written[1]) / 100 if written[1] else 0.0, int(written[2] or 0), text)

    def __bool__(self) -> bool:
        return self.share > 0 or self.verdicts > 0


@dataclass(frozen=True, slots=True)
class LayerShare(AsWritten):
    """Every ``parts``-th layer of a region, from its ``turn``-th on (from 0; None: see `layers.turn_of`)."""

    parts: int = 1
    turn: int | None = None
    text: str = field(default="all", compare=False)

    @classmethod
    def read(cls, text: str, value: object) -> "LayerShare":
        """From ``all``, ``1/8`` or ``1/8@3``. Raises `ConfigError`."""
        written = re.fullmatch(r"1/(\d{1,4})(?:@(\d{1,4}))?", text)
        if text.lower() == "all":
            return cls()
        parts, turn = (int(n) if n else None for n in written.groups()) if written else (0, None)
        if not parts or (turn is not None and turn >= parts):
            raise ConfigError(
                f"CANARY_LAYERS must be all, a share such as 1/8, or one turn of it from 1/8@0 to 1/8@7, got {value!r}"
            )
        return cls(parts, turn, text)


@dataclass(frozen=True, slots=True)
class MemoryShare(AsWritten):
    """Part of a pool's bytes (0 to 1) that Canary's own may take, or None for no limit."""

    share: float | None = 0.01
    text: str = field(default="1%", compare=False)

    @classmethod
    def read(cls, text: str, value: object) -> "MemoryShare":
        """From ``1%`` or ``exact``. Raises `ConfigError`."""
        if text.lower() == "exact":
            return cls(None, text)
        written = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s*%", text)
        if written is None or float(written[1]) > 100:
            raise ConfigError(f"CANARY_MEMORY must be a share of the pool such as 1%, or exact, got {value!r}")
        return cls(float(written[1]) / 100, text)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Address of a server. Prints as written."""

    address: str
    port: int
    text: str = field(default="", compare=False)

    @classmethod
    def parse(cls, value: object) -> "ListenAddress | None":
        """From ``9464``, ``0.0.0.0:9464`` or ``[::]:9464``; None from an empty text. Raises `ConfigError`."""
        if value is None or isinstance(value, cls):
            return value
        text = str(value).strip()
        written = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+)):)?(\d{1,5})", text)
        if not text:
            return None
        if written is None or not 0 < int(written[3]) < 1 << 16:
            raise ConfigError(
                "CANARY_METRICS_LISTEN must be a port such as 9464, or an address and a port such as 0.0.0.0:9464, got "
                f"{value!r}"
            )
        return cls(written[1] or written[2] or "127.0.0.1", int(written[3]), text)

    def __str__(self) -> str:
        return self.text


def notify_target(text: str) -> str:
    """``CANARY_NOTIFY``, unchanged. Raises `ConfigError` for what is neither a program nor an address (https, or http
    of this machine)."""
    scheme, _, rest = text.partition(":")
    near = rest.startswith(("//127.0.0.1:", "//localhost:", "//[::1]:"))
    if not text or (scheme == "exec" and rest.strip()) or scheme == "https" or (scheme == "http" and near):
        return text
    # Not the whole of it: an address may hold a secret.
    raise ConfigError(
        "CANARY_NOTIFY must be exec:program arguments, https://address, or http://localhost:port, "
        f"got one that begins {text[:8]!r}"
    )


def sentence(problem: Mapping[str, Any]) -> str:
    """One of pydantic's reports with the setting's name and value; an error of ours says both."""
    ours = problem.get("ctx", {}).get("error")
    if isinstance(ours, ConfigError):
        return str(ours)
    return f"CANARY_{'.'.join(map(str, problem['loc'])).upper()}: {problem['msg']}, got {problem['input']!r}"


def unit(unit: str) -> dict[str, Any]:
    """The unit of a setting, kept beside the description for `settings`."""
    return {"unit": unit}


_AS_TEXT = PlainSerializer(str, return_type=str)

ScrubBudgetSetting = Annotated[ScrubBudget, NoDecode, BeforeValidator(ScrubBudget.parse), _AS_TEXT]
RecomputeSetting = Annotated[RecomputeShare, NoDecode, BeforeValidator(RecomputeShare.parse), _AS_TEXT]
LayersSetting = Annotated[LayerShare, NoDecode, BeforeValidator(LayerShare.parse), _AS_TEXT]
MemorySetting = Annotated[MemoryShare, NoDecode, BeforeValidator(MemoryShare.parse), _AS_TEXT]
ListenSetting = Annotated[
    ListenAddress | None,
    NoDecode,
    BeforeValidator(ListenAddress.parse),
    PlainSerializer(lambda address: str(address or ""), return_type=str),
]
