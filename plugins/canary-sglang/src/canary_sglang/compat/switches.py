"""SGLang's switches: environment variables that are on or off."""

import pkgutil


def switched_on(name: str, absent: bool = False) -> bool:
    """Whether the switch ``name`` is on for SGLang, by its environment variable or by default. ``absent``: the answer
    where this release has no such switch."""
    try:
        switch = pkgutil.resolve_name(f"sglang.srt.environ:envs.{name}")
    except (ImportError, AttributeError):
        return absent
    return bool(switch.get())
