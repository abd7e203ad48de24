"""`RunOutcome`: the incidents of a program under ``canary run``, for CI: exit code, JUnit file, annotations."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import typer

from canary_core.config import CanaryConfig
from canary_core.config.shown import variable_of_others
from canary_core.incident import Incident
from canary_core.plugins.hookspecs import hookimpl

FOUND = 66
"""Exit code of a program with incidents where these count as a failure: a number of their own, as of sanitizers."""


class RunOutcome:
    """A plugin that collects the incidents of this process. Workers of an engine in processes of their own report by
    their logs and bundles."""

    def __init__(self, config: CanaryConfig) -> None:
        self._config = config
        self.incidents: list[Incident] = []

    @hookimpl
    def canary_incident(self, incident: Incident) -> None:
        """Keeps the incident."""
        self.incidents.append(incident)

    @property
    def fails(self) -> bool:
        """Whether there is an incident that is not suppressed, in raise mode or with the profile ``ci``."""
        counts = self._config.mode == "raise" or self._config.profile == "ci"
        return counts and any(not incident.suppressed for incident in self.incidents)

    def tell(self, junit: Path | None) -> None:
        """Writes the JUnit file, if asked for, and prints annotations where GitHub's runner reads them. Raises OSError
        where the file can't be written."""
        if variable_of_others("GITHUB_ACTIONS") == "true":
            for line in self._annotations():
                typer.echo(line)
        if junit is not None:
            ET.ElementTree(self._suite()).write(junit, encoding="utf-8", xml_declaration=True)

    def _annotations(self) -> Iterator[str]:
        for incident in self.incidents:
            level = "warning" if incident.suppressed else "error"
            yield f"::{level} title={_property(f'KV cache: {_name(incident)}')}::{_data(str(incident))}"

    def _suite(self) -> ET.Element:
        bad = sum(not incident.suppressed for incident in self.incidents)
        count = {"tests": max(len(self.incidents), 1), "failures": bad, "skipped": len(self.incidents) - bad}
        suite = ET.Element("testsuite", {"name": "canary", **{name: str(number) for name, number in count.items()}})
        for incident in self.incidents:
            case = ET.SubElement(suite, "testcase", classname="canary", name=f"{incident.number}: {_name(incident)}")
            if incident.suppressed:
                ET.SubElement(case, "skipped", message=_plain(incident.suppressed))
                continue
            told = ET.SubElement(case, "failure", message=_plain(str(incident)))
            told.text = _plain("\n".join(sentence for d in incident.diagnoses for sentence in d.evidence))
        if not self.incidents:
            ET.SubElement(suite, "testcase", classname="canary", name="no incident")
        return suite


def _name(incident: Incident) -> str:
    return incident.signature or incident.root.kind.name.lower()


def _plain(text: str) -> str:
    """Without characters that XML forbids."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
