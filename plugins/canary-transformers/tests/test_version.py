"""Which Transformers is guarded: tested ones, newer ones with an audit, and none that lacks what is hooked."""

import inspect
import pkgutil
from importlib import metadata

import canary_transformers
import pytest
import torch
from canary_transformers import version
from canary_transformers.targets import API, MANAGER, MIXIN, TARGETS
from tiny.batching import HAS_POOL, Traffic, serve
from tiny.models import batching, generating

from canary_core import AttachError, PluginError, hook_manager, plugins
from canary_core.config import CanaryConfig
from canary_core.testing import Findings

INSTALLED = metadata.version("transformers")


@pytest.fixture
def told(monkeypatch):
    """What this process's plugins are told, as if it had just begun."""
    monkeypatch.setattr("canary_core.plugins.process._process", None)
    findings = Findings()
    hook_manager().register(findings)
    return findings


@pytest.fixture
def newer(monkeypatch):
    """The installed Transformers is newer than what the plugin was tested with."""
    monkeypatch.setattr(version, "SUPPORTED", f">=5.0,<{INSTALLED}")


def functions(names=tuple(t.name for t in TARGETS)):
    """All that is hooked for the whole process, as the engine's classes have it now."""
    owners = {name: pkgutil.resolve_name(name.rpartition(".")[0]) for name in names}
    return {name: inspect.getattr_static(owner, name.rpartition(".")[2], None) for name, owner in owners.items()}


def generate(model):
    """Greedy tokens of `generate()`."""
    ids = torch.arange(3, 15).view(2, 6)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("found", ["5.16.1", "5.17.0rc1"])
def test_an_older_release_is_refused(found, monkeypatch):
    """The sentence names what was found and what to do; nothing is hooked."""
    before = functions()
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: found if name == "transformers" else real(name))
    with pytest.raises(PluginError, match=rf">=5.17,<5.25, got transformers {found}; install transformers>=5.17"):
        canary_transformers.guard(batching("llama"))
    assert functions() == before


@pytest.mark.usefixtures("newer")
def test_a_newer_release_is_guarded_loudly(told):
    """Continuous batching and `generate()` of the real engine: one event, an audit asked for, clean traffic, outputs as
    without Canary."""
    outputs = serve(batching("llama"), Traffic(requests=4)), generate(generating("llama"))
    guards = [canary_transformers.guard(m("llama"), read_check=-1) for m in (batching, generating)]
    guarded = serve(batching("llama"), Traffic(requests=4)), generate(generating("llama"))
    for guard in guards:
        guard.close()
        assert (guard.config.untested_engine, guard.config.audit) == (True, 4)
        assert guard.violations == []
        assert guard.stats()["forwards"] > 3
    assert guarded[0] == outputs[0]
    assert torch.equal(guarded[1], outputs[1])
    (event,) = told.told("untested_engine")
    assert event.level == "warning"
    assert (event.fields["engine"], event.fields["version"]) == ("transformers", INSTALLED)
    assert event.fields["tested"] == version.SUPPORTED
    assert told.told("disabled") == []


@pytest.mark.usefixtures("newer")
def test_a_newer_release_is_refused_for_the_strict(told):
    """``untested="refuse"``: a sentence, no event, nothing hooked."""
    before = functions()
    with pytest.raises(PluginError, match=rf"got transformers {INSTALLED}, which is newer than tested"):
        canary_transformers.guard(batching("llama"), untested="refuse")
    assert functions() == before
    assert told.events == []


def moved(monkeypatch):
    """A function is called otherwise now."""
    cls = pkgutil.resolve_name(MANAGER)
    monkeypatch.setattr(cls, "_one_generation_step", cls._generation_step, raising=False)
    monkeypatch.delattr(cls, "_generation_step")


def renamed(monkeypatch):
    """A parameter is called otherwise now."""
    monkeypatch.setattr(pkgutil.resolve_name(MIXIN), "prepare_inputs_for_generation", lambda model, tokens, **more: {})


def gone(monkeypatch):
    """A class is elsewhere now."""
    monkeypatch.delattr(pkgutil.resolve_name(API), "ContinuousMixin")


BREAKS = [
    (moved, [f"{MANAGER}._generation_step is not there (there is _one_generation_step)"]),
    (renamed, [f"{MIXIN}.prepare_inputs_for_generation has no parameter 'input_ids'; it takes (tokens, **more)"]),
    (gone, [f"{API}.ContinuousMixin.continuous_batching_context_manager is not there"]),
]


@pytest.mark.parametrize(("break_it", "parts"), BREAKS)
@pytest.mark.parametrize("range_", ["tested", "newer"])
def test_a_release_without_what_is_hooked_is_left_alone(break_it, parts, range_, monkeypatch, request):
    """The real Transformers, changed: the sentence names the function, and each class is what it was."""
    if range_ == "newer":
        request.getfixturevalue("newer")
    names = [t.name for t in TARGETS if "ContinuousMixin" not in t.name]
    break_it(monkeypatch)
    before = functions(names)
    with pytest.raises(PluginError) as error:
        canary_transformers.guard(batching("llama"))
    for part in [f"can't hook transformers {INSTALLED}, which is left as it is", *parts]:
        assert part in str(error.value)
    assert functions(names) == before


def test_the_plugin_is_refused_with_the_sentence(monkeypatch, told):
    """As ``CANARY_PLUGINS=transformers`` comes to it: `canary_install` is not called."""
    if not any(p.name == "transformers" for p in metadata.entry_points(group="canary")):
        pytest.skip("canary-transformers is not installed, only on the path: no entry point")
    moved(monkeypatch)
    before = functions()
    config = CanaryConfig.load(plugins="transformers")
    plugins.load(config)
    (plugin,) = plugins.install(config)
    assert "_generation_step is not there" in plugin.error
    assert functions() == before
    (event,) = told.told("plugins_installed")
    assert event.fields["failed"] == {"transformers": plugin.error}


def test_several_guards_see_through_their_own_hooks():
    """A function that is hooked already still tells its parameters."""
    with canary_transformers.guard(batching("llama")), canary_transformers.guard(generating("llama")) as second:
        generate(generating("llama"))
    assert second.stats()["forwards"] == 4


@pytest.mark.skipif(not HAS_POOL, reason="from 5.18 on")
@pytest.mark.parametrize("mode", ["log", "raise"])
def test_a_cache_with_other_methods_is_not_touched(mode, monkeypatch, told):
    """What is hooked on single objects is looked at when the cache is there: a sentence, no method of it wrapped, and
    in log mode the engine serves what it would."""
    module = "transformers.generation.continuous_batching.cache_allocators.cache_pool"
    pool = pytest.importorskip(module).CachePool
    free = pool.free_blocks
    monkeypatch.setattr(pool, "free_blocks", lambda self, group, blocks: free(self, group, blocks))
    model = batching("llama")
    sentence = r"CachePool\.free_blocks has no parameter 'index', 'block_ids'; it takes \(group, blocks\)"
    if mode == "raise":
        with canary_transformers.guard(model, mode=mode), pytest.raises(AttachError, match=sentence):
            serve(model, Traffic(requests=2))
        return
    outputs = serve(model, Traffic(requests=2))
    with canary_transformers.guard(model) as guard:
        assert serve(model, Traffic(requests=2)) == outputs
    assert guard.stats()["forwards"] == 0
    (event,) = told.told("disabled")
    assert event.fields["where"] == "attach to transformers"
    assert "CachePool.free_blocks has no parameter 'index', 'block_ids'" in event.fields["error"]
