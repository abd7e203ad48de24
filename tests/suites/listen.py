"""Within an engine's own tests: writes each finding, and how many forwards each Canary has seen, to a file.

For pytest's ``-p``, in a process that has Canary's plugins loaded."""

import json
import os
from pathlib import Path

from canary_core import Canary, Violation, hook_manager, hookimpl

FINDINGS = Path(os.environ["SUITES_FINDINGS"])


class Listener:
    """Lines of JSON, each written at once: a test may end its process."""

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        """Of any Canary of this process that is made from now on."""
        self._put({"event": "finding", "test": os.environ.get("PYTEST_CURRENT_TEST", ""), "text": str(violation)})

    @hookimpl
    def canary_detached(self, canary: Canary) -> None:
        """A cache or an engine is gone."""
        self._put({"event": "end", "forwards": canary.forwards})

    def _put(self, line: dict[str, object]) -> None:
        with FINDINGS.open("a") as file:
            file.write(json.dumps(line) + "\n")


hook_manager().register(Listener(), "suites")
