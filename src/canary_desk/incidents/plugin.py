"""The built-in plugin ``incidents``: has each incident looked at."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from canary_core.guard.canary import Canary
from canary_core.incident import Incident
from canary_core.plugins.hookspecs import hookimpl
from canary_desk.incidents.investigator import Investigator


class Investigations:
    """An `Investigator` for each Canary with a finding."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Canary, Investigator] = WeakKeyDictionary()

    @hookimpl(tryfirst=True)
    def canary_incident(self, canary: Canary, incident: Incident) -> None:
        """Takes the evidence before anybody changes it, and passes it to the thread."""
        self._investigator(canary).look(canary, incident)

    @hookimpl
    def canary_probe(self, canary: Canary, passed: Callable[[], None]) -> bool | None:
        """Hands the probe to the thread."""
        return self._investigator(canary).prove(canary, passed) or None

    @hookimpl(tryfirst=True)
    def canary_settle(self, canary: Canary, last: bool) -> None:
        """Waits for the thread; ``last``: ends it."""
        investigator = self._of.get(canary)
        if investigator is not None:
            investigator.close() if last else investigator.wait()

    def _investigator(self, canary: Canary) -> Investigator:
        known = self._of.get(canary)
        if known is None:
            known = self._of[canary] = Investigator(canary.config)
        return known
