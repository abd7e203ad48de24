"""``canary new-plugin``: a distribution of one's own that guards a toy engine, to put a real engine in its place."""

from canary_core.kit.scaffold.distribution import Names, write

__all__ = ["Names", "write"]
