import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="canary-transformers' tests run the real engine: pip install transformers")

import canary_transformers
import transformers
from packaging.specifiers import SpecifierSet

from canary_core import testing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips these tests on a Transformers that the plugin does not guard, as an SGLang environment may have."""
    found, supported = transformers.__version__, canary_transformers.SUPPORTED
    if SpecifierSet(supported).contains(found, prereleases=True):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(
                pytest.mark.skip(reason=f"canary-transformers needs transformers {supported}, here is {found}")
            )


@pytest.fixture(scope="session", autouse=True)
def quick_engine() -> Iterator[None]:
    """The engine collects garbage at each stop, which with everything imported takes most of a test's time."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def guard() -> Iterator[Callable[..., canary_transformers.Guard]]:
    """`canary_transformers.guard` with all bytes re-read before each forward; closed after the test."""
    guards = []

    def start(model: Any, **config: Any) -> canary_transformers.Guard:
        guards.append(canary_transformers.guard(model, **{"read_check": -1, "scrub_budget": "64KiB", **config}))
        return guards[-1]

    yield start
    for one in guards:
        one.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models lose more by threads than they gain."""
    with testing.one_thread():
        yield
