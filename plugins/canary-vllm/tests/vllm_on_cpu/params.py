"""Engines that tests share, as parameters of the fixture ``engine``."""

from typing import Any

import pytest

from vllm_on_cpu.setups import SETUPS


def shared_engine(name: str) -> Any:
    """The one of `SETUPS` with that name: in its process, and on the older release where that runs it."""
    setup = SETUPS[name]
    marks = [pytest.mark.xdist_group(f"process {setup.process}")]
    return pytest.param(name, marks=[*marks, pytest.mark.older_release] if setup.older else marks)
