"""``canary new-plugin``: a distribution that guards a toy engine, to be replaced by a real one."""

from canary_kit.scaffold.distribution import Names, write

__all__ = ["Names", "write"]
