"""Canary for SGLang. Set ``CANARY_PLUGINS=sglang`` and start the engine as always, without an edit of its code.

SGLang calls `canary_sglang.plugin.start` through its own plugin group, in every process it starts.
"""

from canary_sglang.version import SUPPORTED, __version__

__all__ = ["SUPPORTED", "__version__"]
