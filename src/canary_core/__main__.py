"""``python -m canary_core`` is the ``canary`` command."""

from canary_desk.cli.app import main

main()
