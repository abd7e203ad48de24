"""SGLang's switches: environment variables that are on or off."""

import pkgutil


def switched_on(name: str, absent: bool = False) -> bool:
    """Whether SGLang itself takes its environment variable ``name``, set or not, for on; ``absent`` where this release
    has no such switch, whatever the variable says."""
    try:
        switch = pkgutil.resolve_name(f"sglang.srt.environ:envs.{name}")
    except (ImportError, AttributeError):
        return absent
    return bool(switch.get())
