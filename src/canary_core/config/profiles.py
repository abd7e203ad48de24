"""Values that ``CANARY_PROFILE`` and ``CANARY_ON_VIOLATION`` set, unless others are given."""

from typing import Any, Literal, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

Profile = Literal["watch", "hunt", "ci"]

HUNT: dict[str, Any] = {
    "read_check": -1,
    "scrub_budget": "1%",
    "sweep_interval": 32,
    "state_interval": 1,
    "table_interval": 1,
    "store_check": True,
    "weights": True,
    "hit_check": True,
    "ranks_interval": 16,
    "read_interval": 1,
    "memory": "exact",
    "recompute": "5%",
}
"""Settings for earlier findings, at a price: reads compared, a busier scrub, sweeps, states every step, stores compared
layer by layer, weights, hits and ranks compared, counters read after each forward, exact fingerprints, recomputes."""

PROTECT: dict[str, Any] = {"hit_check": True, "read_interval": 1}
"""Values set by ``on_violation=protect``, unless given: what is shared is compared before, and told at once."""

PROFILES: dict[str, dict[str, Any]] = {
    "watch": {}, "hunt": HUNT, "ci": {**HUNT, "mode": "raise", "audit": 8, "recompute": "8"}
}  # fmt: skip
"""Values set by each profile, unless a variable or an argument is given. ``watch`` has the defaults."""


def plain(value: object, kind: object) -> object:
    """The value of a setting of type ``kind``, whose choices may be written in any case and with blanks around."""
    if isinstance(value, str) and kind == tuple[str, ...]:
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value.strip().lower() if isinstance(value, str) and get_origin(kind) is Literal else value


class ProfileSource(PydanticBaseSettingsSource):
    """Settings source of last resort: the profile's values; raise mode without one, as in tests, has those of hunt."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The profile's value of one field, None where the profile has none."""
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """All values of the profile; empty for an unknown profile, reported by validation."""
        given = {name: plain(value, Profile) for name, value in self.current_state.items()}
        profile = given.get("profile", "hunt" if given.get("mode") == "raise" else "watch")
        values = {"profile": profile, **(PROFILES.get(profile, {}) if isinstance(profile, str) else {})}
        return values | PROTECT if given.get("on_violation") == "protect" else values
