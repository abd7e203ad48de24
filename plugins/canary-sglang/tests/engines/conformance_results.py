"""What became of the conformance suite with MHA, for docs/support-matrix.md (`support.matrix` of the core's tests)::

python -m engines.conformance_results "SGLang 0.5.21 (MHA)" sglang.json
"""

import json
import sys
import tempfile
from pathlib import Path

from canary_kit.conformance import PluginConformance, suite_tests
from engines.process import EngineProcess
from engines.setups import conformance


def main() -> None:
    """Writes the results of the engine that is installed, under the heading that was given."""
    heading, path = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        process = EngineProcess(conformance("mha"), Path(folder))
        outcomes = [process.conform(test=test) for test in suite_tests(PluginConformance)]
        process.close()
    Path(path).write_text(json.dumps({"engine": heading, "outcomes": outcomes}), encoding="utf-8")


if __name__ == "__main__":
    main()
