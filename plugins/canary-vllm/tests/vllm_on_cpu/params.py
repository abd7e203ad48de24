"""Engines that tests share, as parameters of the fixture ``engine``."""

from typing import Any

import pytest

from vllm_on_cpu.setups import SETUPS, lacking


def shared_engine(name: str) -> Any:
    """The one of `SETUPS` with that name: in its process, on the older release where that runs it, in turns where it
    takes them, and skipped on a machine that can't."""
    setup = SETUPS[name]
    marks = [pytest.mark.xdist_group(f"process {setup.process}")]
    if setup.older:
        marks.append(pytest.mark.older_release)
    if setup.turns:
        marks.append(pytest.mark.takes_turns("the same with Llama and with the hybrid", unit=f"engine {name}"))
    if (reason := lacking(name)) is not None:
        marks.append(pytest.mark.skip(reason=reason))
    return pytest.param(name, marks=marks)
