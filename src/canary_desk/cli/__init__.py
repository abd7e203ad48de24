"""The ``canary`` command."""

from canary_desk.cli.app import main

__all__ = ["main"]
