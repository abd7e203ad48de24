"""``canary explain``: from an incident's bundle to a page for people."""

from canary_core.desk.explain.page import page
from canary_core.desk.explain.story import Story, check, tell
from canary_core.desk.explain.terminal import show

__all__ = ["Story", "check", "page", "show", "tell"]
