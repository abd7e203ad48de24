"""Values that ``CANARY_PROFILE`` and ``CANARY_ON_VIOLATION`` set, unless others are given."""

from typing import Any, Literal

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
}
"""Settings for earlier findings, at a price: reads compared, a busier scrub, sweeps, states every step, stores compared
layer by layer, weights, prefix hits and ranks compared, counters read after every forward."""

PROTECT: dict[str, Any] = {"hit_check": True, "read_interval": 1}
"""Values set by ``on_violation=protect``, unless given: what is shared is compared before, and told at once."""

PROFILES: dict[str, dict[str, Any]] = {
    "watch": {},
    "hunt": HUNT,
    "ci": {**HUNT, "mode": "raise", "audit": 8},
}
"""Values set by each profile, unless a variable or an argument is given. ``watch`` has the defaults."""
