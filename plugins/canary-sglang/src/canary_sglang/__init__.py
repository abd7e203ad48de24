"""Canary for SGLang. ``CANARY_PLUGINS=sglang`` and the engine started as always: nothing in it is edited.

SGLang calls `canary_sglang.plugin.start` through its own plugin group, in every process it starts.
"""

from canary_sglang.version import SUPPORTED, __version__

__all__ = ["SUPPORTED", "__version__"]
