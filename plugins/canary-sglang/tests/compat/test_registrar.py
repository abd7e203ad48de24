"""When functions of SGLang are wrapped."""

import sys
from types import ModuleType

import pytest
from canary_sglang.compat.registrar import Registrar


@pytest.fixture
def made_up(monkeypatch):
    """A module with a function that is to be wrapped."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    module = ModuleType("made_up")
    module.answer = lambda: "engine"
    monkeypatch.setitem(sys.modules, "made_up", module)
    yield module
    HookRegistry._hooks.pop("made_up.answer", None)
    HookRegistry._patched.discard("made_up.answer")


@pytest.mark.parametrize(("loaded", "answer"), [(False, "engine"), (True, "guarded engine")])
def test_hooks_wait_for_the_loader_unless_it_has_run(monkeypatch, made_up, loaded, answer):
    """SGLang's loader applies hooks once in a process. Those that come later would never be applied, and the engine
    would run unguarded, so they are applied at once."""
    import sglang.srt.plugins

    monkeypatch.setattr(sglang.srt.plugins, "_plugins_loaded", loaded)
    Registrar().register({"made_up.answer": (lambda original: f"guarded {original()}", "AROUND")})
    assert made_up.answer() == answer
