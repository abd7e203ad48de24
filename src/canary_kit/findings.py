"""`Findings`: a plugin that collects findings and events."""

from canary_core.events import Event
from canary_core.incident import Incident
from canary_core.plugins.hookspecs import hookimpl
from canary_core.violation import Violation


class Findings:
    """Collects, oldest first: ``violations`` not dismissed by anybody, their ``incidents``, and ``events``.

    Register it in a manager, or give it to `private_hooks`::

        findings = Findings()
        canary = Canary(regions, config, hooks=private_hooks(findings))
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.incidents: list[Incident] = []
        self.events: list[Event] = []

    def told(self, name: str) -> list[Event]:
        """The events of a name."""
        return [event for event in self.events if event.name == name]

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        """Keeps the violation."""
        self.violations.append(violation)

    @hookimpl
    def canary_incident(self, incident: Incident) -> None:
        """Keeps the incident."""
        self.incidents.append(incident)

    @hookimpl
    def canary_event(self, event: Event) -> None:
        """Keeps the event."""
        self.events.append(event)
