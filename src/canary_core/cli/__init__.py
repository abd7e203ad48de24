"""The ``canary`` command."""

from canary_core.cli.app import main

__all__ = ["main"]
