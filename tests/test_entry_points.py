"""The functions that engines' own plugin loaders call: each installed plugin's, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

ENTER = """
import sys
from importlib.metadata import entry_points

for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    for point in entry_points(group=group, name="canary"):
        for _ in range(2):
            try:
                point.load()()
            except Exception as error:  # as engines do
                print("raised:", error)
print("the engine goes on")
"""
"""What vLLM and SGLang do, one after the other, twice: load each plugin of their group and call it."""


def entered(*arguments, **variables):
    """Events that the entry points tell, by name, and the process, with these ``CANARY_*`` variables only."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("CANARY_")}
    command = [sys.executable, *arguments, "-c", ENTER]
    environment = {**bare, "CANARY_LOG_FORMAT": "json", **variables}
    environment = {name: value for name, value in environment.items() if value}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    return {event.pop("event"): event for event in told}, len(told), done


@pytest.mark.parametrize(
    ("plugins", "advice"),
    [
        ("vlm", "Did you mean 'vllm'?"),
        ("SGLag", "Did you mean 'sglang'?"),
        ("sglang,nothing_like_it", "Correct the name, or install the distribution that has the plugin"),
    ],
)
def test_a_plugin_that_is_not_installed_is_told_by_whatever_engine_starts(plugins, advice):
    """Once, with what is installed and the nearest name, also if it is another engine that starts: it would run
    unguarded without a word."""
    told, number, done = entered(CANARY_PLUGINS=plugins)
    assert (list(told), number) == (["start_failed"], 1)
    assert told["start_failed"]["level"] == "error"
    wrong = plugins.rpartition(",")[2]
    for part in (f"CANARY_PLUGINS names {wrong!r}, which is not installed", "sglang, transformers, vllm", advice):
        assert part in told["start_failed"]["error"]
    assert "the engine goes on" in done.stdout


def test_in_raise_mode_the_engine_does_not_start():
    """A test that was to run guarded must not pass unguarded."""
    told, _, done = entered(CANARY_PLUGINS="vlm", CANARY_MODE="raise")
    assert "unguarded" not in told["start_failed"]["error"]
    assert "canary: CANARY_PLUGINS names 'vlm'" in done.stderr
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("mode", ["log", " RAISE"])
def test_a_misspelt_value_is_told_as_an_engine_that_is_not_guarded(mode):
    """``CANARY_ON_VIOLATION=protct``: whoever reads the line must know that nothing is protected. In raise mode the
    engine does not start."""
    *_, done = entered(CANARY_PLUGINS="vllm", CANARY_ON_VIOLATION="protct", CANARY_MODE=mode)
    (told,) = [line for line in done.stderr.splitlines() if "start_failed" in line]
    assert "CANARY_ON_VIOLATION: Input should be 'report'" in told
    assert ("runs unguarded" in told, "the engine goes on" in done.stdout) == (mode == "log", mode == "log")


@pytest.mark.parametrize("name", ["vLLM", "SGLANG, vllm"])
def test_case_does_not_matter(name):
    """The engine as its makers write it is its plugin's name, too; that plugin is loaded and looks for its engine."""
    told, _, _ = entered(CANARY_PLUGINS=name)
    assert "start_failed" not in told
    wanted = [part.strip().lower() for part in name.split(",")]
    assert sorted([*told["plugins_loaded"]["loaded"], *told["plugins_loaded"]["failed"]]) == sorted(wanted)


def test_a_misspelt_variable_is_told_though_no_plugin_is_named():
    """``CANARY_PLUGIN=vllm``: once, with the variable that is meant. Variables that resemble no setting may be
    anybody's, and where no plugin is asked for they are none of ours."""
    told, number, done = entered(CANARY_PLUGIN="vllm", CANARY_SERVICE_HOST="10.0.0.1")
    assert (list(told), number) == (["unknown_setting"], 1)
    assert told["unknown_setting"]["level"] == "warning"
    assert told["unknown_setting"]["variable"] == "CANARY_PLUGIN"
    assert told["unknown_setting"]["hint"] == "did you mean CANARY_PLUGINS?"
    assert done.stdout == "the engine goes on\n"


@pytest.mark.parametrize(
    "variables",
    [
        {"CANARY_LOG_FORMAT": ""},
        {"CANARY_PLUGINS": "transformers"},
        {"CANARY_MODE": "raise", "CANARY_SERVICE_PORT": "80"},
    ],
    ids=["nothing", "another engine's", "a mode alone and somebody else's"],
)
def test_whoever_asks_for_nothing_is_told_nothing(variables):
    """No variable of ours, a plugin of another engine that is installed, or a variable that is not ours: no line."""
    told, _, done = entered(**variables)
    assert (told, done.stderr, done.stdout) == ({}, "", "the engine goes on\n")
