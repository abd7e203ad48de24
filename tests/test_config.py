"""Settings: where they come from, what is refused, and that each is described."""

import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.guarded import Guarded

from canary_core import CanaryConfig, ConfigError, ViolationError
from canary_core.config.shown import settings, unknown_variables

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """An environment without Canary's settings."""
    for name in list(os.environ):
        if name.startswith("CANARY_"):
            monkeypatch.delenv(name)


def test_environment_and_argument(monkeypatch):
    """A setting comes from CANARY_<NAME>; an argument wins over it; an empty variable counts as unset."""
    monkeypatch.setenv("CANARY_MODE", "raise")
    monkeypatch.setenv("CANARY_BYTES", "partial")
    monkeypatch.setenv("CANARY_STATS_INTERVAL", "")
    config = CanaryConfig.load(bytes="off")
    assert (config.mode, config.bytes, config.stats_interval) == ("raise", "off", 1000)


@pytest.mark.parametrize(("value", "names"), [("", ()), ("a", ("a",)), ("a,b", ("a", "b")), (" a , ,b,", ("a", "b"))])
def test_plugin_list(value, names, monkeypatch):
    """CANARY_PLUGINS is separated by commas; blanks and empty parts are dropped."""
    monkeypatch.setenv("CANARY_PLUGINS", value)
    assert CanaryConfig.load().plugins == names


def test_bad_settings_are_named_with_their_value(monkeypatch):
    """One error names every bad setting with the value it got."""
    monkeypatch.setenv("CANARY_MODE", "loud")
    monkeypatch.setenv("CANARY_RING_ROWS", "0")
    with pytest.raises(ConfigError, match=r"CANARY_MODE: .*'log'.*got 'loud'.*CANARY_RING_ROWS: .*got '0'"):
        CanaryConfig.load()


def test_bad_settings_of_ours_and_of_pydantic_are_named_together():
    """A budget and a fault, which Canary reads itself, stand beside what pydantic refuses."""
    with pytest.raises(ConfigError) as error:
        CanaryConfig.load(mode="loud", scrub_budget="nonsense", faults="bitrot")
    for part in ("CANARY_MODE: ", "CANARY_SCRUB_BUDGET must be", "CANARY_FAULTS: unknown fault 'bitrot'"):
        assert part in str(error.value)


def test_settings_survive_json():
    """What is written as JSON reads back as the same settings."""
    config = CanaryConfig.load(scrub_budget="64MiB", plugins="a,b", faults="lost_write")
    written = config.model_dump_json()
    assert '"scrub_budget":"64MiB"' in written
    assert CanaryConfig.model_validate_json(written) == config


@pytest.mark.parametrize(("audit", "audited"), [(0, 4), (3, 4), (20, 20)])
def test_an_untested_engine_is_a_mark_on_the_settings(audit, audited):
    """At least 4 forwards are audited; copies keep the mark, the settings it was made of have none."""
    config = CanaryConfig.load(audit=audit, mode="raise")
    marked = config.for_untested_engine()
    assert (config.untested_engine, config.audit) == (False, audit)
    assert (marked.untested_engine, marked.audit, marked.mode) == (True, audited, "raise")
    assert marked.model_copy(update={"rank": 3}).untested_engine


def test_the_mark_is_no_setting(monkeypatch):
    """Whoever starts an engine can't claim that it is tested, or not."""
    monkeypatch.setenv("CANARY_UNTESTED_ENGINE", "true")
    assert not CanaryConfig.load().untested_engine
    assert "CANARY_UNTESTED_ENGINE" in unknown_variables()
    with pytest.raises(ConfigError, match="CANARY_UNTESTED_ENGINE"):
        CanaryConfig.load(untested_engine=True)


def test_unknown_argument_is_refused():
    """A misspelt argument is an error, not ignored."""
    with pytest.raises(ConfigError, match="CANARY_MODES"):
        CanaryConfig.load(modes="log")


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("CANARY_PLUGIN", "CANARY_PLUGINS"),
        ("CANARY_MOED", "CANARY_MODE"),
        ("CANARY_SCRUB_BUGDET", "CANARY_SCRUB_BUDGET"),
        ("CANARY_FAULT", "CANARY_FAULTS"),
        ("canary_log_fromat", "CANARY_LOG_FORMAT"),
        # Kubernetes sets these for a service that is called canary.
        ("CANARY_SERVICE_HOST", None),
        ("CANARY_SERVICE_PORT", None),
        ("CANARY_PORT", None),
        ("CANARY_PORT_80_TCP_ADDR", None),
    ],
)
def test_unknown_variables_and_the_nearest_setting(variable, near, monkeypatch):
    """A variable that is no setting is found with the setting it was meant for; others' have none."""
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("CANARY_MODEL", "draft")
    monkeypatch.setenv("CANARY_EMPTY", "")
    assert unknown_variables() == {variable.upper(): near}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("watch", "log", 0, "0.1%", 0, 256, 4, 0)),
        ({"CANARY_PROFILE": "watch", "CANARY_MODE": "raise"}, ("watch", "raise", 0, "0.1%", 0, 256, 4, 0)),
        ({"CANARY_PROFILE": "hunt"}, ("hunt", "log", -1, "1%", 32, 1, 1, 0)),
        ({"CANARY_PROFILE": "ci"}, ("ci", "raise", -1, "1%", 32, 1, 1, 8)),
        ({"CANARY_MODE": "raise"}, ("hunt", "raise", -1, "1%", 32, 1, 1, 0)),
        ({"CANARY_PROFILE": "ci", "CANARY_MODE": "log", "CANARY_AUDIT": "0"}, ("ci", "log", -1, "1%", 32, 1, 1, 0)),
        ({"CANARY_PROFILE": "hunt", "CANARY_READ_CHECK": "7"}, ("hunt", "log", 7, "1%", 32, 1, 1, 0)),
    ],
)
def test_one_dial(environment, expected, monkeypatch):
    """A profile sets what nobody has set; a variable of its own wins; raise mode alone waits for no round of the
    scrub."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    c = CanaryConfig.load()
    found = (c.profile, c.mode, c.read_check, str(c.scrub_budget), c.sweep_interval, c.state_interval)
    assert (*found, c.read_interval, c.audit) == expected


def test_choices_may_be_written_in_any_case_and_with_blanks_around(monkeypatch):
    """Also where the choice sets other settings; names of plugins and paths are left as they are."""
    written = {
        "ON_VIOLATION": " PROTECT ",
        "MODE": "Log",
        "PROFILE": "HUNT ",
        "BYTES": "ALL",
        "UNREADY_FILE": "/Tmp/A ",
    }
    for name, value in written.items():
        monkeypatch.setenv(f"CANARY_{name}", value)
    c = CanaryConfig.load(plugins="vLLM, sglang")
    assert (c.on_violation, c.mode, c.profile, c.bytes, c.unready_file) == ("protect", "log", "hunt", "all", "/Tmp/A ")
    assert (c.plugins, c.hit_check, c.read_check) == (("vLLM", "sglang"), True, -1)


def test_an_argument_wins_over_the_profile(monkeypatch):
    """As over the environment."""
    monkeypatch.setenv("CANARY_PROFILE", "ci")
    config = CanaryConfig.load(mode="log", read_check=3)
    assert (config.mode, config.read_check, config.state_interval) == ("log", 3, 1)


@pytest.mark.parametrize("profile", ["loud", ["hunt"]])
def test_an_unknown_profile_lists_the_known_ones(profile):
    """One sentence, with what was given."""
    with pytest.raises(ConfigError, match=r"CANARY_PROFILE: .*'watch', 'hunt' or 'ci'.*got"):
        CanaryConfig.load(profile=profile)


def test_a_flipped_bit_is_told_at_the_next_forward_in_raise_mode():
    """Without a profile: the forward that would read the slot is the one that ends."""
    guarded = Guarded(mode="raise")
    request = guarded.submit(tokens=6)
    guarded.step()
    guarded.engine.v[1][request.slots[2], 3] += 1
    with pytest.raises(ViolationError) as error:
        guarded.decode()
    assert (error.value.violation.kind.name, error.value.violation.source) == ("BYTES", "v.1")


def test_config_is_frozen():
    """Settings don't change under a running engine."""
    with pytest.raises(ValidationError):
        CanaryConfig().mode = "off"


@pytest.mark.parametrize("setting", settings(CanaryConfig()), ids=lambda s: s.variable)
def test_every_setting_is_documented(setting):
    """Every setting has a description that ends its sentence, its values or unit, and its default reads back."""
    assert setting.description.endswith(".")
    assert setting.values
    name = setting.variable.removeprefix("CANARY_").lower()
    if setting.default:
        assert getattr(CanaryConfig.load(**{name: setting.default}), name) == getattr(CanaryConfig(), name)


def test_only_config_reads_the_environment():
    """No other file of the packages looks at environment variables, but for the one that hands all of them to a process
    of its own, with Triton's cache among them, and the one that reads LMCache's own settings."""
    readers = [
        str(file.relative_to(ROOT))
        for file in ROOT.glob("src/**/*.py")
        if re.search(r"\bos\.environ|\bgetenv\b", file.read_text())
    ]
    assert sorted(readers) == ["src/canary_adapters/lmcache.py", "src/canary_core/ops/compile_process.py"]


@pytest.mark.parametrize(
    ("text", "address", "port"),
    [("9464", "127.0.0.1", 9464), ("0.0.0.0:80", "0.0.0.0", 80), ("[::1]:65535", "::1", 65535), ("host:1", "host", 1)],
)
def test_where_metrics_are_served(text, address, port):
    """A port alone is of this machine only; it prints as it was written."""
    found = CanaryConfig.load(metrics_listen=text).metrics_listen
    assert found is not None
    assert (found.address, found.port, str(found)) == (address, port, text)
    assert CanaryConfig.load(metrics_listen="").metrics_listen is None
