"""SGLang's switches: boolean environment variables."""

import pkgutil


def switched_on(name: str, absent: bool = False) -> bool:
    """Whether the switch ``name`` is on for SGLang, by its environment variable or by default. ``absent``: the answer
    for releases without the switch."""
    try:
        switch = pkgutil.resolve_name(f"sglang.srt.environ:envs.{name}")
    except (ImportError, AttributeError):
        return absent
    return bool(switch.get())
