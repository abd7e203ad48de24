"""``canary explain``: from an incident's bundle to a page for people."""

from canary_desk.explain.page import page
from canary_desk.explain.story import Story, check, tell
from canary_desk.explain.terminal import show

__all__ = ["Story", "check", "page", "show", "tell"]
