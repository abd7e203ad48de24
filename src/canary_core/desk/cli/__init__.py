"""The ``canary`` command."""

from canary_core.desk.cli.app import main

__all__ = ["main"]
