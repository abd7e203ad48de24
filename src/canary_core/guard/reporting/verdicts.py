"""tell: hands a finding's verdict to plugins that act, whether or not the finding is reported."""

from canary_core.config import CanaryConfig
from canary_core.runtime.workspace import Switch
from canary_core.verdict import Verdict
from canary_core.violation import Violation


def tell(switch: Switch, config: CanaryConfig, finding: Violation | None, late: bool) -> None:
    """Calls `canary_verdict` for a new finding, a repeated one, or one beyond the limits of reports. None: findings had
    no room in the ring, so all KV is in doubt. ``late``: see `Verdict.of`. A plugin's exception is reported."""
    verdict = Verdict(None, spoiled=True) if finding is None else Verdict.of(finding, config, late)
    if verdict is not None:
        switch.call("canary_verdict", verdict=verdict)
