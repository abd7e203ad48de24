"""Canary for Hugging Face Transformers.

    import canary_transformers

    canary_transformers.guard(model)

Or ``CANARY_PLUGINS=transformers canary run script.py``, which changes no line of the script.
"""

from canary_transformers.guard import Guard, guard
from canary_transformers.version import SUPPORTED, __version__

__all__ = ["SUPPORTED", "Guard", "__version__", "guard"]
