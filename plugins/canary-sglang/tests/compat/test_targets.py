"""The functions of SGLang that are hooked: this release has them, and one that has not is left alone."""

import pytest
from canary_sglang import plugin
from canary_sglang.compat import targets

from canary_core import CanaryConfig, EngineInfo, HookTarget, PluginError, require_engine

TESTED = EngineInfo("sglang", "0.5.21", ">=0.5.14,<0.5.24", supported=True)


@pytest.fixture
def on_cpu():
    """SGLang imported in this process."""
    return pytest.importorskip("sglang.srt.managers.scheduler")


@pytest.mark.without_engine
def test_every_function_that_is_always_hooked_is_named():
    """Each with the parameters that its hook reads; what some releases lack is optional."""
    named = {t.name: t for t in plugin.canary_targets()}
    assert set(targets.REQUIRED) == {n for n, t in named.items() if not t.optional}
    assert {*targets.OPTIONAL, *targets.PREPARES, *targets.RELEASES} < named.keys()
    assert named[targets.FORWARD].parameters == ("forward_batch",)
    assert named[targets.RUN_BATCH].parameters == ("batch",)


@pytest.mark.older_release
def test_this_release_has_them(on_cpu):
    """Nothing is missing in the installed SGLang, whatever is hooked already."""
    assert {t.name: t.problem() for t in targets.hook_targets() if t.problem()} == {}
    assert set(targets.targets()) >= set(targets.REQUIRED)
    assert targets.missing() == []


def test_an_optional_function_under_no_known_name_is_told(on_cpu, monkeypatch):
    """One of two names is enough; with neither the sentence has both."""
    common = pytest.importorskip(targets.COMMON)
    for name in targets.existing(targets.CHECKPOINT):
        monkeypatch.delattr(common, name.rpartition(".")[2])
    assert targets.missing() == [" or ".join(targets.CHECKPOINT)]


@pytest.mark.older_release
def test_a_release_without_them_is_left_alone(on_cpu, monkeypatch):
    """One function is gone, another one's parameter is called otherwise: the sentence names both, and the functions
    are what they were."""
    scheduler = on_cpu.Scheduler
    monkeypatch.delattr(scheduler, "flush_cache")
    monkeypatch.setattr(scheduler, "run_batch", lambda self, plan: None)
    before = dict(vars(scheduler))
    with pytest.raises(PluginError) as error:
        require_engine("canary-sglang", TESTED, plugin.canary_targets(), CanaryConfig.load())
    for part in (
        f"{targets.FLUSH} is not there",
        f"{targets.RUN_BATCH} has no parameter 'batch'; it takes (plan)",
        "can't hook sglang 0.5.21, which is left as it is",
    ):
        assert part in str(error.value)
    assert dict(vars(scheduler)) == before


@pytest.mark.without_engine
def test_a_function_that_is_not_there_does_not_exist():
    """`existing` leaves out what this SGLang lacks, also where SGLang itself is missing."""
    assert targets.existing(["sglang.no_such_module.Class.function"]) == []
    assert HookTarget("json.loads").problem() is None
    assert targets.existing(["json.loads"]) == ["json.loads"]
