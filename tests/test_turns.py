"""Tests that take turns in CI: each runs for one commit of six, and all without the variable."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import turns

ROOT = Path(__file__).parents[1]
TAKES_TURNS = pytest.mark.takes_turns("the others").mark
OF_A_PAIR = pytest.mark.takes_turns("the others", unit="pair").mark
MODULE = """
    import pytest

    takes_turns = pytest.mark.takes_turns("the others")

    @takes_turns
    def test_left_out(): ...

    @takes_turns
    @pytest.mark.parametrize("number", range(7))
    def test_by_turns(number): ...

    def test_always(): ...
"""


class Item:
    """As much of a test as `turns` looks at."""

    def __init__(self, name: str, mark: Any = None) -> None:
        self.nodeid, self.mark = name, mark

    def get_closest_marker(self, _name: str) -> Any:
        """As pytest's."""
        return self.mark


ITEMS = [
    Item("always"),
    *[Item(f"each {number}", TAKES_TURNS) for number in range(5)],
    *[Item(f"pair {number}", OF_A_PAIR) for number in range(2)],
    Item("last", TAKES_TURNS),
]


def test_six_commits_run_each_test():
    """Each test that takes turns has one, its unit with it; others run in each."""
    parts = [[item.nodeid for item in turns.those_of(ITEMS, turn)] for turn in range(turns.TURNS)]
    assert parts == [
        ["always", "each 0", "last"],
        ["always", "each 1"],
        ["always", "each 2"],
        ["always", "each 3"],
        ["always", "each 4"],
        ["always", "pair 0", "pair 1"],
    ]


def test_what_is_not_selected_has_no_turn(tmp_path):
    """With the project's conftest, as CI calls pytest: turns are counted among the tests that are selected."""
    (tmp_path / "conftest.py").write_text(ROOT.joinpath("conftest.py").read_text())
    (tmp_path / "test_module.py").write_text(textwrap.dedent(MODULE))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-p", "no:randomly", "-k", "by or always"]
    environment = {**os.environ, "CI_TURN": "0"}
    done = subprocess.run(
        [*command, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert told == ["test_by_turns[0]", "test_by_turns[6]", "test_always"], done.stdout + done.stderr
