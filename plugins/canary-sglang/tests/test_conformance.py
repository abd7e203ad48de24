"""The conformance suite that every plugin must pass, on real SGLang on a CPU: each test makes engines of its own, in
one process for each kind of pool."""

from collections.abc import Iterator

import pytest
from engines.process import EngineProcess
from engines.setups import conformance

from canary_kit.conformance import PluginConformance, suite_tests

pytestmark = pytest.mark.timeout(900)

COVERED_BY = "the suite with slots of one token; test_engine with every kind of pool"


def _marks(name: str) -> list[pytest.MarkDecorator]:
    chosen = pytest.mark.older_release if name == "mha" else pytest.mark.beyond_ci(COVERED_BY)
    return [pytest.mark.xdist_group(f"conformance_{name}"), chosen]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=_marks(name)) for name in ("mha", "pages", "fp8", "mla", "swa")]
)
def conforming(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A process that runs tests of the suite on engines like one of `SETUPS`."""
    process = EngineProcess(conformance(request.param), tmp_path_factory.mktemp(request.param))
    yield process
    process.close()


@pytest.mark.parametrize("test", suite_tests(PluginConformance))
def test_conforms(conforming, test):
    """What the suite asks of a plugin holds; abilities that SGLang does not have are skipped."""
    outcome = conforming.conform(test=test)
    if outcome["result"] == "undeclared":
        pytest.skip(outcome["message"])
    assert outcome["result"] == "passed", outcome["error"] or outcome["message"]
