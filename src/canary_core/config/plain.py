"""`PlainSettings`: settings as people write them."""

from typing import Literal, get_origin

from pydantic import ValidationInfo, field_validator
from pydantic_settings import BaseSettings


def choice(value: object) -> object:
    """One of a few words without blanks around it and in lower case; anything else unchanged."""
    return value.strip().lower() if isinstance(value, str) else value


class PlainSettings(BaseSettings):
    """Settings whose choices may be written in any case and with blanks around, and whose tuples are written with
    commas."""

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object, info: ValidationInfo) -> object:
        kind = cls.model_fields[str(info.field_name)].annotation
        if get_origin(kind) is Literal:
            return choice(value)
        if kind == tuple[str, ...] and isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value
