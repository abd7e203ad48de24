"""`diagnose` and what incidents say: sentences hold what is known, and words for what is not."""

import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.any_finding import FINDINGS

from canary_core.incident import Incident
from canary_core.kinds import registry
from canary_core.kinds.classes import UNKNOWN
from canary_desk.incidents.diagnosis import diagnose


@settings(max_examples=1500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(FINDINGS, min_size=1, max_size=4))
def test_a_diagnosis_has_no_none_and_no_empty_name(found):
    """Of findings of which any field may be missing, where nobody has looked at the device."""
    incident = Incident(found[0])
    for violation in found:
        incident.add(violation)
    incident.diagnoses = diagnose(incident, None, ())
    assert incident.diagnoses
    assert {d.what for d in incident.diagnoses} <= {*registry.of(incident.root.kind).classes, UNKNOWN}
    for text in (str(incident), *(text for d in incident.diagnoses for text in d.evidence)):
        text = re.sub(r"None of these|request -1\b|request (0|77)\b", "NAME", text)
        assert "None" not in text
        assert "  " not in text
        assert "''" not in text
        assert "slot -" not in text
        assert "position -" not in text
        assert not re.search(r" [.,:;]|[.,:;]{2}", text)
