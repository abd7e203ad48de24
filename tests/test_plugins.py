"""Finding, loading and installing plugins, on real distributions."""

import threading
from importlib import metadata

import pytest
from support.toy import ToyEngine

from canary_core import (
    PROTOCOL,
    Canary,
    CanaryConfig,
    ConfigError,
    Event,
    PluginError,
    hookimpl,
    plugins,
    require_engine,
)
from canary_core.plugins import EngineInfo, Plugins, hookspecs
from canary_core.plugins.discovery import GROUP

WORKING = """
from canary_core import EngineInfo, hookimpl

calls = []

@hookimpl
def canary_engine():
    return EngineInfo.of("toy-engine", ">=2,<3")

@hookimpl
def canary_install(config):
    calls.append(("install", config.mode))

@hookimpl
def canary_uninstall():
    calls.append(("uninstall",))
"""

ENGINE = """
class Runner:
    def forward(self, batch): ...
    def idle(self): ...
"""

HOOKING = """
from canary_core import EngineInfo, HookTarget, hookimpl

CANARY_PROTOCOL = 1
configs = []

@hookimpl
def canary_engine():
    return EngineInfo.of("toy-engine", ">=2,<3", {"==2.4.1": "its cache frees blocks twice"})

@hookimpl
def canary_targets():
    return [HookTarget("toy_engine.Runner.forward", ("batch",)), "toy_engine.Runner.idle"]

@hookimpl
def canary_install(config):
    import toy_engine
    configs.append(config)
    original = toy_engine.Runner.forward
    toy_engine.Runner.forward = lambda runner, batch: original(runner, batch)

@hookimpl
def canary_uninstall(): ...
"""

HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("canary_")}

OBSERVER = """
from canary_core import hookimpl

events = []

@hookimpl
def canary_event(event):
    events.append(event)
"""


def config(*names: str, **knobs: object) -> CanaryConfig:
    """Settings that allow the named plugins."""
    return CanaryConfig.load(plugins=names, **knobs)


@pytest.fixture
def toy(distribution):
    """A working plugin ``toy`` for an engine that is installed in a supported version."""
    distribution("toy-engine", {}, version="2.4")
    distribution("canary-toy", {"canary_sample": WORKING}, {"toy": "canary_sample"}, version="0.3")


def test_only_allowed_plugins_are_loaded(toy, distribution):
    """An installed plugin that CANARY_PLUGINS does not name is not even imported."""
    distribution("canary-bomb", {"canary_bomb": "raise SystemError('imported')"}, {"bomb": "canary_bomb"})
    found = Plugins()
    (plugin,) = found.load(config("toy"))
    assert (plugin.name, plugin.distribution, plugin.version, plugin.error) == ("toy", "canary-toy", "0.3", None)
    assert found.manager.has_plugin("toy")
    assert not found.manager.has_plugin("bomb")


def test_nothing_is_loaded_without_an_allow_list(toy, logs):
    """With CANARY_PLUGINS empty, load and install find nothing to do and report nothing."""
    found = Plugins()
    assert found.load(config()) == ()
    assert found.install(config()) == ()
    assert logs == []


def test_unknown_name_lists_what_is_installed(toy):
    """A name that isn't installed is an error that lists the installed ones; nothing is loaded."""
    found = Plugins()
    with pytest.raises(PluginError, match=r"'tyo'.*not installed; installed plugins: .*\btoy\b") as error:
        found.load(config("toy", "tyo"))
    assert "Did you mean 'toy'?" in str(error.value)
    assert "pip install" not in str(error.value)
    assert found.loaded == ()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import no_such_engine", "can't be imported: ModuleNotFoundError"),
        ("1/0", "can't be imported: ZeroDivisionError"),
        ("x = 1", "implements no hook"),
        (
            "from canary_core import hookimpl\n@hookimpl\ndef canary_dismis(violation): ...",
            "did you mean canary_dismiss?",
        ),
        ("from canary_core import hookimpl\n@hookimpl\ndef canary_dismiss(finding): ...", "finding"),
        ("from canary_core import hookimpl\n@hookimpl\ndef canary_engine(): 1/0", "canary_engine of plugin 'broken'"),
        ("def canary_install(config): ...", "without @hookimpl"),
    ],
    ids=["import", "crash", "no hooks", "misspelt hook", "misspelt argument", "engine look-up", "unmarked hook"],
)
def test_one_broken_plugin_does_not_stop_the_others(source, expected, toy, distribution, logs):
    """A broken plugin is recorded and reported with its name and error, leaves no trace, and the next one is loaded."""
    distribution("canary-broken", {"canary_broken": source}, {"broken": "canary_broken"})
    found = Plugins()
    broken, working = found.load(config("broken", "toy"))
    assert expected in broken.error
    assert "'broken'" in broken.error
    assert working.error is None
    assert not found.manager.has_plugin("broken")
    (event,) = logs
    assert (event["event"], event["log_level"]) == ("plugins_loaded", "error")
    assert (event["loaded"], event["failed"]) == (["toy"], {"broken": broken.error})


def test_two_distributions_with_one_plugin_name(toy, distribution):
    """Where two distributions declare the same plugin name, neither is guessed: the error names both."""
    distribution("canary-toy-fork", {"canary_sample_fork": WORKING}, {"toy": "canary_sample_fork"})
    (plugin,) = Plugins().load(config("toy"))
    assert "canary-toy, canary-toy-fork" in plugin.error


def test_case_of_a_name_matters_only_where_nothing_else_differs(toy, distribution):
    """``TOY`` is ``toy``, once; of two plugins ``eye`` and ``Eye`` only the very name is one."""
    distribution("canary-eye", {"canary_eye": OBSERVER}, {"eye": "canary_eye", "Eye": "canary_eye"})
    assert [p.name for p in Plugins().load(config("TOY", "toy", "Eye"))] == ["toy", "Eye"]
    with pytest.raises(PluginError, match="names 'EYE', which is not installed"):
        Plugins().load(config("EYE"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("tyo", "toy"), ("TOY2", "toy"), ("canary-toy", "toy"), ("Canary_Toy", "toy"), ("sglag", "sglang"), ("x", None)],
)
def test_the_plugin_that_was_meant(name, meant):
    """A name that is nearly one, in whatever case, or the name of its distribution."""
    (missing,) = plugins.not_installed([name], ["toy", "sglang"])
    advice = (
        f"Did you mean {meant!r}?" if meant else "Correct the name, or install the distribution that has the plugin"
    )
    assert f"CANARY_PLUGINS names {name!r}, which is not installed; installed plugins: sglang, toy. {advice}" in str(
        missing.error
    )
    assert "pip install" not in str(missing.error)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("transfomers", "Did you mean 'transformers' (pip install canary-transformers)?"),
        ("canary-vlm", "Did you mean 'vllm' (pip install canary-vllm)?"),
        ("vllm", "Install it: pip install canary-vllm"),
    ],
)
def test_a_typo_is_never_sent_to_an_index(name, advice):
    """A command has only names of distributions that exist: somebody else may own a misspelt one."""
    (missing,) = plugins.not_installed([name], ["toy"])
    assert str(missing.error).endswith(advice)


def test_loading_twice_is_harmless(toy, logs):
    """A second load of the same names does nothing and reports nothing."""
    found = Plugins()
    first = found.load(config("toy"))
    assert found.load(config("toy")) == first
    assert [e["event"] for e in logs] == ["plugins_loaded"]


def test_install_checks_the_engine_first_and_happens_once(toy, logs):
    """A plugin whose engine is supported is installed once, with the settings, however often install is called."""
    found = Plugins()
    (plugin,) = found.load(config("toy", mode="raise"))
    found.install(config("toy", mode="raise"))
    found.install(config("toy", mode="raise"))
    assert plugin.engine == EngineInfo("toy-engine", "2.4", ">=2,<3", supported=True)
    assert plugin.target.calls == [("install", "raise")]
    assert logs[-1]["event"] == "plugins_installed"
    assert logs[-1]["installed"] == ["toy"]


def test_uninstall_undoes_and_allows_another_install(toy):
    """Uninstall calls the plugin's undo once; a later install hooks the engine again."""
    found = Plugins()
    (plugin,) = found.load(config("toy"))
    found.install(config("toy"))
    found.uninstall()
    found.uninstall()
    found.install(config("toy"))
    assert plugin.target.calls == [("install", "log"), ("uninstall",), ("install", "log")]


def test_mode_off_installs_nothing(toy):
    """In mode off no engine is hooked."""
    found = Plugins()
    (plugin,) = found.load(config("toy", mode="off"))
    found.install(config("toy", mode="off"))
    assert plugin.target.calls == []


@pytest.mark.parametrize(("version", "got"), [("1.9", "got toy-engine 1.9"), (None, "which is not installed")])
def test_unsupported_engine_is_refused(version, got, distribution, logs):
    """An engine that is out of range or missing is never hooked; record and event say version and range."""
    if version:
        distribution("toy-engine", {}, version=version)
    distribution("canary-toy", {"canary_sample": WORKING}, {"toy": "canary_sample"})
    found = Plugins()
    (before,) = found.load(config("toy"))
    (after,) = found.install(config("toy"))
    assert got in after.error
    assert "toy-engine >=2,<3" in after.error
    assert before.target.calls == []
    assert not found.manager.has_plugin("toy")
    assert (logs[-1]["log_level"], logs[-1]["failed"]) == ("error", {"toy": after.error})


@pytest.fixture
def hooking(distribution):
    """Makes a plugin ``toy`` with targets, for an engine of the version and the source that are given."""

    def make(version, engine=ENGINE, plugin=HOOKING):
        distribution("toy-engine", {"toy_engine": engine}, version=version)
        distribution("canary-toy", {"canary_sample": plugin}, {"toy": "canary_sample"})

    return make


def installed(**knobs):
    """The plugin ``toy``, loaded and installed."""
    found = Plugins()
    found.load(config("toy", **knobs))
    (plugin,) = found.install(config("toy", **knobs))
    return plugin


@pytest.mark.parametrize("version", ["2.4", "2.9rc1"])
def test_a_tested_engine_is_guarded_with_the_settings_as_they_are(version, hooking, logs):
    """No event but that it is installed, and no audit that nobody asked for."""
    hooking(version)
    plugin = installed()
    (given,) = plugin.target.configs
    assert (plugin.error, given.untested_engine, given.audit) == (None, False, 0)
    assert [e["event"] for e in logs] == ["plugins_loaded", "plugins_installed"]


@pytest.mark.parametrize(("audit", "audited"), [(0, 4), (9, 9)])
@pytest.mark.parametrize("mode", ["log", "raise"])
def test_a_newer_engine_is_guarded_with_an_audit_and_a_loud_event(mode, audit, audited, hooking, logs):
    """The event names the engine, its version, what was tested, what happens now, and how to refuse it."""
    hooking("3.1")
    plugin = installed(mode=mode, audit=audit)
    (given,) = plugin.target.configs
    assert (plugin.error, given.untested_engine, given.audit, given.mode) == (None, True, audited, mode)
    (event,) = (e for e in logs if e["event"] == "untested_engine")
    assert event["log_level"] == "warning"
    assert [event[f] for f in ("plugin", "engine", "version", "tested")] == ["toy", "toy-engine", "3.1", ">=2,<3"]
    assert event["audited_forwards"] == audited
    assert "newer" in event["reason"]
    assert "CANARY_UNTESTED=refuse" in event["hint"]


def test_a_newer_engine_can_be_refused(hooking, logs):
    """``CANARY_UNTESTED=refuse``: the sentence says so, and nothing of the engine is imported."""
    hooking("3.1", engine="raise SystemError('imported')")
    plugin = installed(untested="refuse")
    assert "got toy-engine 3.1, which is newer than tested (CANARY_UNTESTED=refuse)" in plugin.error
    assert plugin.target.configs == []
    assert [e["event"] for e in logs] == ["plugins_loaded", "plugins_installed"]


def test_a_known_bad_engine_is_refused_with_the_reason(hooking, logs):
    """Although it is in the range."""
    hooking("2.4.1", engine="raise SystemError('imported')")
    plugin = installed()
    assert "refuses toy-engine 2.4.1: its cache frees blocks twice; install toy-engine>=2,<3" in plugin.error
    assert plugin.target.configs == []
    assert logs[-1]["failed"] == {"toy": plugin.error}


@pytest.mark.parametrize("version", ["2.4", "3.1"])
@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (ENGINE.replace("def forward", "def run"), ["toy_engine.Runner.forward is not there"]),
        (ENGINE.replace("batch", "plan"), ["toy_engine.Runner.forward has no parameter 'batch'; it takes (plan)"]),
        ("class Runner: ...", ["toy_engine.Runner.forward is not there", "toy_engine.Runner.idle is not there"]),
        ("raise OSError('no driver')", ["importing toy_engine itself failed (OSError: no driver)"]),
    ],
    ids=["moved", "renamed", "both", "import"],
)
def test_an_engine_without_what_is_hooked_is_left_alone(version, engine, told, hooking, logs):
    """Tested or newer: each function that is missing or has other parameters is named, and nothing is patched."""
    hooking(version, engine=engine)
    plugin = installed()
    for part in [f"plugin 'toy' can't hook toy-engine {version}, which is left as it is", *told]:
        assert part in plugin.error
    assert "Install toy-engine>=2,<3 or a release of canary-toy that supports it" in plugin.error
    assert plugin.target.configs == []
    assert [e["event"] for e in logs] == ["plugins_loaded", "plugins_installed"]
    assert logs[-1]["failed"] == {"toy": plugin.error}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("1/0", "canary_targets of plugin 'toy' raised ZeroDivisionError"),
        ("return [3]", "a hook target must be a HookTarget or a dotted name, got 3"),
        ("return None", None),
    ],
)
def test_what_a_plugin_names_as_targets(body, expected, hooking):
    """What it raises, or gives instead of targets, is its error; None is nothing to check."""
    named = 'return [HookTarget("toy_engine.Runner.forward", ("batch",)), "toy_engine.Runner.idle"]'
    hooking("2.4", plugin=HOOKING.replace(named, body))
    plugin = installed()
    assert plugin.error == expected if expected is None else expected in plugin.error
    assert len(plugin.target.configs) == (expected is None)


@pytest.mark.usefixtures("fresh_process")
def test_a_plugins_own_way_in_is_checked_alike(hooking, logs):
    """`require_engine` gives the settings that `canary_install` would get, tells of a newer engine once, and raises
    what else would be the plugin's error."""
    hooking("3.1")
    engine = EngineInfo.of("toy-engine", ">=2,<3")
    for _ in range(2):
        given = require_engine("canary-toy", engine, ["toy_engine.Runner.forward"], CanaryConfig.load())
        assert (given.untested_engine, given.audit) == (True, 4)
    assert [e["event"] for e in logs] == ["untested_engine"]
    with pytest.raises(PluginError, match=r"'canary-toy' can't hook toy-engine 3\.1.*Runner\.gone is not there"):
        require_engine("canary-toy", engine, ["toy_engine.Runner.gone"], CanaryConfig.load())
    with pytest.raises(PluginError, match="CANARY_UNTESTED=refuse"):
        require_engine("canary-toy", engine, [], CanaryConfig.load(untested="refuse"))
    off = CanaryConfig.load(mode="off")
    assert require_engine("canary-toy", engine, ["toy_engine.Runner.gone"], off) is off


@pytest.mark.parametrize(
    ("declared", "ours", "expected"),
    [
        ("", 1, None),
        ("CANARY_PROTOCOL = 1", 1, None),
        ("CANARY_PROTOCOL = 2", 1, "and this canary-core speaks 1; install a newer canary-core, or a release"),
        ("CANARY_PROTOCOL = 1", 2, "protocol 1 of Canary, and this canary-core speaks 2; install a newer release"),
        ("", 2, "speaks protocol 1 of Canary (it has no CANARY_PROTOCOL, which counts as 1)"),
        ("CANARY_PROTOCOL = '1'", 1, "CANARY_PROTOCOL = '1', which must be an integer"),
        ("CANARY_PROTOCOL = True", 1, "CANARY_PROTOCOL = True, which must be an integer"),
    ],
)  # fmt: skip
def test_a_plugin_for_another_protocol_is_refused(declared, ours, expected, distribution, monkeypatch):
    """With a sentence: the plugin, its number, ours, and what to install. None counts as 1. Built-in plugins speak
    ours."""
    monkeypatch.setattr(hookspecs, "PROTOCOL", ours)
    distribution("canary-eye", {"canary_eye": declared + OBSERVER}, {"eye": "canary_eye"}, version="0.7")
    (plugin,) = Plugins().load(config("eye"))
    if expected is None:
        assert (plugin.error, plugin.protocol) == (None, 1 if declared else None)
    else:
        assert plugin.error.startswith("plugin 'eye' of canary-eye 0.7 ")
        assert expected in plugin.error
    assert {p.protocol for p in plugins.installed() if p.built_in} == {ours}


def test_a_plugin_for_another_protocol_may_have_other_hooks(distribution):
    """The number is looked at first: that hooks don't fit follows from it."""
    source = "from canary_core import hookimpl\nCANARY_PROTOCOL = 7\n@hookimpl\ndef canary_from_the_future(): ..."
    distribution("canary-eye", {"canary_eye": source}, {"eye": "canary_eye"})
    (plugin,) = Plugins().load(config("eye"))
    assert "speaks protocol 7" in plugin.error
    assert "canary_from_the_future" not in plugin.error


def test_the_protocol_is_public():
    """A plugin can compare with it."""
    assert PROTOCOL == hookspecs.PROTOCOL == 1


@pytest.mark.parametrize("hook", sorted(n for n, h in HOOKS.items() if h.__code__.co_argcount))
def test_a_plugin_takes_as_few_arguments_as_it_likes(hook, distribution):
    """So a hook may gain arguments and no plugin breaks: one that takes none of them is loaded and called."""
    source = f"from canary_core import hookimpl\ncalls = []\n@hookimpl\ndef {hook}(): calls.append(1)"
    distribution("canary-few", {"canary_few": source}, {"few": "canary_few"})
    found = Plugins()
    (plugin,) = found.load(config("few"))
    assert plugin.error is None
    plugin.target.calls.clear()
    others = [p for p in found.manager.get_plugins() if p is not plugin.target]
    given = dict.fromkeys(HOOKS[hook].__code__.co_varnames[: HOOKS[hook].__code__.co_argcount])
    found.manager.subset_hook_caller(hook, others)(**given)
    assert plugin.target.calls == [1]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("canary_dismiss(finding)", ["'finding'", "its arguments are violation"]),
        ("canary_attached(canary, pool, *, rank)", ["'pool', 'rank'", "its arguments are canary"]),
        ("canary_configure(settings)", ["'settings'", "its arguments are config, manager"]),
        ("canary_engine(config)", ["'config'", "it has no arguments"]),
    ],
)  # fmt: skip
def test_an_argument_that_a_hook_does_not_have(source, told, distribution):
    """The sentence names the hook, the argument, and the arguments that there are."""
    code = f"from canary_core import hookimpl\n@hookimpl\ndef {source}: ..."
    distribution("canary-odd", {"canary_odd": code}, {"odd": "canary_odd"})
    (plugin,) = Plugins().load(config("odd"))
    taken, there = told
    hook = source.partition("(")[0]
    sentence = f"{hook} takes {taken}, which that hook does not give; {there}"
    assert plugin.error == f"plugin 'odd' does not fit Canary's hooks: {sentence}"


@pytest.mark.parametrize(
    ("hooks", "halves"),
    [
        ("engine install uninstall", []),
        ("engine targets install uninstall", []),
        ("install uninstall", ["canary_install without canary_engine"]),
        ("engine install", ["canary_install without canary_uninstall"]),
        ("engine", ["canary_engine without canary_install"]),
        ("uninstall", ["canary_uninstall without canary_install"]),
        ("targets", ["canary_targets without canary_install"]),
        ("install", ["canary_install without canary_engine", "canary_install without canary_uninstall"]),
    ],
)
def test_half_a_plugin_is_told(hooks, halves, distribution, logs):
    """It is loaded all the same, since what is there works; each missing half is a warning with what it means."""
    bodies = {"engine": "return EngineInfo.of('toy-engine', '>=2')", "targets": "return []"}
    parts = [f"@hookimpl\ndef canary_{name}(): {bodies.get(name, '...')}\n" for name in hooks.split()]
    source = "from canary_core import EngineInfo, hookimpl\n" + "".join(parts)
    distribution("canary-half", {"canary_half": source}, {"half": "canary_half"})
    (plugin,) = Plugins().load(config("half"))
    assert plugin.error is None
    told = [(e["log_level"], e["plugin"], e["reason"]) for e in logs if e["event"] == "plugin_incomplete"]
    assert told == [("warning", "half", warning) for warning in plugin.warnings]
    assert [w.removeprefix("plugin 'half' has ").partition(":")[0] for w in plugin.warnings] == halves


def test_release_candidate_inside_the_range_is_supported(distribution):
    """Engines are often run as release candidates or nightly builds; these count by their number."""
    distribution("toy-engine", {}, version="2.5rc1")
    assert EngineInfo.of("toy-engine", ">=2,<3").supported


def test_failing_install_is_undone_and_recorded(distribution, toy, logs):
    """A plugin that raises while hooking its engine is undone and refused; the others are installed."""
    source = WORKING.replace('calls.append(("install", config.mode))', "raise KeyError('forward')")
    distribution("canary-half", {"canary_half": source}, {"half": "canary_half"})
    found = Plugins()
    half, working = found.load(config("half", "toy"))
    refused, installed = found.install(config("half", "toy"))
    assert "canary_install of plugin 'half' raised KeyError: 'forward'" in refused.error
    assert half.target.calls == [("uninstall",)]
    assert working.target.calls == [("install", "log")]
    assert installed.error is None
    assert logs[-1]["installed"] == ["toy"]


def test_events_reach_plugins(distribution):
    """A loaded plugin sees every event from its own loading on."""
    distribution("canary-eye", {"canary_eye": OBSERVER}, {"eye": "canary_eye"})
    found = Plugins()
    (plugin,) = found.load(config("eye"))
    found.emit(Event("stats", fields={"violations": 0}))
    assert [e.name for e in plugin.target.events] == ["plugins_loaded", "stats"]


def test_a_raising_reporter_silences_nobody(logs):
    """Built-in reporting comes before a plugin that raises, and the failure is itself reported."""

    class Bad:
        @hookimpl
        def canary_event(self, event):
            raise RuntimeError("no socket")

    found = Plugins()
    found.manager.register(Bad())
    found.emit(Event("stats"))
    assert [e["event"] for e in logs] == ["stats", "reporting_failed"]
    assert logs[1]["while_reporting"] == "stats"
    assert "no socket" in logs[1]["error"]


@pytest.mark.usefixtures("fresh_process")
def test_the_process_has_one_manager():
    """Threads that ask for the manager at the same time get the same one, with built-in reporting in it."""
    got = []
    threads = [threading.Thread(target=lambda: got.append(plugins.hook_manager())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, got))) == 1
    assert got[0].has_plugin("reporting")


@pytest.mark.usefixtures("fresh_process")
def test_start_reads_the_environment(toy, monkeypatch):
    """An engine's plugin loader needs nothing but `start`: it loads and installs what CANARY_PLUGINS names, once."""
    monkeypatch.setenv("CANARY_PLUGINS", "toy")
    plugins.start()
    (plugin,) = plugins.start()
    assert plugin.target.calls == [("install", "log")]
    plugins.uninstall()
    assert plugin.target.calls[-1] == ("uninstall",)


@pytest.mark.usefixtures("fresh_process")
def test_a_misspelt_setting_is_told_once(monkeypatch, logs):
    """A start tells variables that are no setting, with the one that was meant, and never fails for them."""
    monkeypatch.setenv("CANARY_PLUGIN", "toy")
    monkeypatch.setenv("CANARY_DEPLOYMENT", "blue")
    for _ in range(2):
        assert plugins.start() == ()
    told = {e["variable"]: (e["event"], e["log_level"], e["hint"]) for e in logs}
    assert len(logs) == 2
    assert told["CANARY_PLUGIN"] == ("unknown_setting", "warning", "did you mean CANARY_PLUGINS?")
    assert told["CANARY_DEPLOYMENT"][:2] == ("unknown_setting", "info")


@pytest.mark.usefixtures("fresh_process")
@pytest.mark.parametrize(
    ("variable", "value", "error"), [("CANARY_MODE", "loud", ConfigError), ("CANARY_PLUGINS", "nope", PluginError)]
)
def test_a_failed_start_is_never_silent(variable, value, error, monkeypatch, logs):
    """Engines swallow their plugins' exceptions, so a start that fails is reported before it raises."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(error):
        plugins.start()
    assert [e["event"] for e in logs] == ["start_failed"]
    assert value in logs[0]["error"]
    assert logs[0]["error"].endswith("; until that is corrected the engine runs unguarded")


@pytest.mark.usefixtures("fresh_process")
def test_start_for_a_plugin_that_is_not_named_does_nothing(toy, distribution, monkeypatch):
    """An engine's plugin loader calls it in every process; only what CANARY_PLUGINS names is started."""
    distribution("canary-eye", {"canary_eye": OBSERVER}, {"eye": "canary_eye"})
    monkeypatch.setenv("CANARY_PLUGINS", "eye")
    plugins.start_for("toy")
    assert plugins.load(CanaryConfig(plugins=())) == ()
    monkeypatch.setenv("CANARY_PLUGINS", "toy")
    plugins.start_for("toy")
    plugins.start_for("toy")
    (plugin,) = plugins.start()
    assert plugin.target.calls == [("install", "log")]


@pytest.mark.usefixtures("fresh_process")
@pytest.mark.parametrize(("mode", "error"), [("log", PluginError), ("raise", SystemExit)])
def test_a_failed_start_for_a_plugin_ends_the_process_in_raise_mode(mode, error, monkeypatch, logs):
    """Engines log and swallow what plugins raise, which must not leave a process unguarded in raise mode."""
    monkeypatch.setenv("CANARY_MODE", mode)
    monkeypatch.setenv("CANARY_PLUGINS", "toy,nope")
    with pytest.raises(error):
        plugins.start_for("toy")
    assert [e["event"] for e in logs] == ["start_failed"]


def test_installed_lists_everything_without_loading(toy, distribution):
    """The listing holds built-in, allowed, other and broken plugins, and changes no manager."""
    distribution("canary-broken", {"canary_broken": "1/0"}, {"broken": "canary_broken"})
    found = {p.name: p for p in plugins.installed()}
    assert found["reporting"].built_in
    assert found["reporting"].hooks == ("canary_configure", "canary_event", "canary_violation")
    assert found["toy"].hooks == ("canary_engine", "canary_install", "canary_uninstall")
    assert found["toy"].engine.version == "2.4"
    assert "ZeroDivisionError" in found["broken"].error
    assert not plugins.hook_manager().has_plugin("toy")


def test_built_in_plugins_are_found_without_metadata(monkeypatch):
    """Where Canary is only on PYTHONPATH, its own plugins are there all the same."""

    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    assert [(p.name, p.version, p.error) for p in plugins.installed()] == [
        ("reporting", None, None),
        ("incidents", None, None),
        ("notify", None, None),
        ("faults", None, None),
        ("metrics", None, None),
        ("control", None, None),
    ]
    assert Plugins().manager.has_plugin("reporting")


def test_another_manager_has_built_in_plugins_of_its_own_and_looks_for_nothing(monkeypatch):
    """An engine may need one for each of its caches."""
    first = Plugins()

    def look(*args, **kwargs):
        raise AssertionError("nothing is to be looked for")

    monkeypatch.setattr(metadata, "version", look)
    monkeypatch.setattr(metadata.EntryPoint, "load", look)
    managers = first.manager, first.another_manager(), first.another_manager()
    for name in ("reporting", "faults", "metrics", "control"):
        assert len({id(manager.get_plugin(name)) for manager in managers}) == 3


def test_a_plugin_with_the_name_of_a_built_in_one_is_refused(distribution):
    """It can't take reporting's place, nor stop the process."""
    distribution("canary-loud", {"canary_loud": OBSERVER}, {"reporting": "canary_loud"})
    (plugin,) = Plugins().load(config("reporting"))
    assert plugin.error == "plugin 'reporting' of canary-loud has the name of a built-in plugin; rename it"


def test_a_class_is_made_into_an_object_for_each_manager(distribution):
    """What one manager's plugin remembers is not known to that of another manager."""
    source = (
        "from canary_core import hookimpl\n"
        "class Eye:\n"
        "    def __init__(self): self.events = []\n"
        "    @hookimpl\n"
        "    def canary_event(self, event): self.events.append(event.name)\n"
    )
    distribution("canary-eye", {"canary_eye": source}, {"eye": "canary_eye:Eye"})
    (one,), (other,) = Plugins().load(config("eye")), Plugins().load(config("eye"))
    assert one.target is not other.target
    assert one.target.events == ["plugins_loaded"]


def test_settings_reach_a_plugin_before_it_is_told_anything(distribution):
    """A plugin hears the settings whenever plugins are loaded and whenever a Canary is built, with its manager."""
    source = (
        "from canary_core import hookimpl\n"
        "calls = []\n"
        "@hookimpl\n"
        "def canary_configure(config, manager): calls.append((config.seed, manager))\n"
        "@hookimpl\n"
        "def canary_event(event): calls.append(event.name)\n"
    )
    distribution("canary-eye", {"canary_eye": source}, {"eye": "canary_eye"})
    found = Plugins()
    (eye,) = found.load(config("eye", seed=1))
    assert eye.target.calls == [(1, found.manager), "plugins_loaded"]
    found.load(config("eye", seed=2))
    assert eye.target.calls[2:] == [(2, found.manager)]
    Canary([ToyEngine().region()], config(seed=3, silence_s=0), hooks=found.manager)
    told = eye.target.calls[3:]
    # Where it is the first pool of the process, the places of metrics and control socket are told as well.
    assert [call for call in told if call not in ("metrics", "control")] == [(3, found.manager), "attached", "coverage"]
    Canary([ToyEngine().region()], config(seed=4, mode="off"), hooks=found.manager)
    assert len(eye.target.calls) == 3 + len(told)


def test_a_plugin_that_fails_on_the_settings_is_refused(toy, distribution, logs):
    """It is reported with the error and unregistered; the others go on."""
    source = "from canary_core import hookimpl\n@hookimpl\ndef canary_configure(config, manager): 1/0"
    distribution("canary-broken", {"canary_broken": source}, {"broken": "canary_broken"})
    found = Plugins()
    broken, working = found.load(config("broken", "toy"))
    assert broken.error == "canary_configure of plugin 'broken' raised ZeroDivisionError: division by zero"
    assert working.error is None
    assert not found.manager.has_plugin("broken")
    assert logs[-1]["failed"] == {"broken": broken.error}


def test_failed_reporting_is_told_even_where_somebody_took_reporting_out(logs):
    """A manager without built-in reporting."""

    class Bad:
        @hookimpl
        def canary_event(self, event):
            raise RuntimeError("no socket")

    found = Plugins()
    found.manager.unregister(name="reporting")
    found.manager.register(Bad())
    found.emit(Event("stats"))
    assert [e["event"] for e in logs] == ["reporting_failed"]


def test_a_distribution_found_twice_counts_once(toy, distribution, tmp_path, monkeypatch):
    """An editable install may be on sys.path twice; that is one plugin, not a conflict."""
    monkeypatch.syspath_prepend(str(tmp_path / "canary-toy"))
    assert len([p for p in metadata.entry_points(group=GROUP) if p.name == "toy"]) == 1
    (plugin,) = Plugins().load(config("toy"))
    assert plugin.error is None


@pytest.mark.usefixtures("fresh_process")
def test_module_level_emit_reaches_this_process(findings):
    """`plugins.emit` reports through the manager of this process."""
    plugins.emit(Event("silence", "error"))
    assert [e.name for e in findings.events] == ["silence"]
