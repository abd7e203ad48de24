"""Facts known before an engine is started: each `Check` is one line of the report."""

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from canary_core import plugins
from canary_core.config import CanaryConfig
from canary_core.config.shown import unknown_variables, variable_of_others
from canary_core.errors import CanaryError, error_text
from canary_core.installed import version
from canary_core.ops import backends
from canary_core.plugins import targets
from canary_core.plugins.discovery import new_manager
from canary_desk.control import client
from canary_desk.doctor import places, self_test
from canary_desk.doctor.places import CheckVerdict

ENGINES = ("sglang", "vllm", "transformers", "lmdeploy", "tensorrt_llm")
"""Engines to look for, with or without a plugin."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one look. ``verdict``: ok; note, for something worth knowing; bad, for an obstacle to the guard asked
    for."""

    part: str
    what: str
    verdict: CheckVerdict
    text: str


def machine(device: torch.device) -> Iterator[Check]:
    """Python, torch, triton, the driver and the GPUs, and the back end for ``device``."""
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check("machine", "python", "ok", system)
    yield Check("machine", "torch", "ok", str(torch.__version__))
    triton = version("triton")
    yield Check("machine", "triton", "ok" if triton else "note", triton or "not installed: GPUs can't be guarded")
    driver = _driver()
    if driver:
        yield Check("machine", "driver", "ok", driver)
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        size = f"{found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}"
        yield Check("machine", f"GPU {number}", "ok", f"{found.name}, {size}")
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds none"
        yield Check("machine", "GPU", "note", f"none: {why}")
    try:
        chosen = backends.choose("auto", device)
        yield Check("machine", "back end", "ok", f"{chosen.name} on {device}")
    except CanaryError as error:
        yield Check("machine", "back end", "bad", str(error))


def settings(config: CanaryConfig) -> Iterator[Check]:
    """The environment's settings, variables without a setting, whether bundles and metrics have a place, and whether
    the secret of the fingerprints can be used."""
    yield Check("settings", "profile", "ok", f"{config.profile}, mode {config.mode}")
    for name, near in unknown_variables().items():
        hint = f"no setting; did you mean {near}?" if near else "no setting of Canary"
        yield Check("settings", name, "bad" if near else "note", hint)
    shared = variable_of_others("PROMETHEUS_MULTIPROC_DIR")
    looked_at = {
        "incidents": places.incident_dir(config),
        "metrics": places.metrics(config, shared),
        "keys": places.key_file(config),
    }
    for what, found in looked_at.items():
        if found is not None:
            yield Check("settings", what, *found)


def engines(config: CanaryConfig) -> Iterator[Check]:
    """Installed engines, and for each plugin whether it would guard its engine, or why not. Imports the plugins'
    engines, to look for the functions to hook."""
    found = [plugin for plugin in plugins.installed() if not plugin.built_in]
    covered = {plugin.engine.name for plugin in found if plugin.engine is not None}
    for name in ENGINES:
        found_version = version(name)
        if found_version and name not in covered:
            yield Check("engines", name, "note", f"{found_version}, and no plugin for it is installed")
    named = plugins.as_installed(config.plugins, [p.name for p in found])
    for plugin in found:
        allowed = plugin.name in named
        reason = _why_not(plugin, config) or places.filtered_out(plugin.name, plugin.distribution)
        name = plugin.engine.describe(config.untested) if plugin.engine else "no engine"
        if reason is not None:
            yield Check("plugins", plugin.name, "bad" if allowed else "note", f"would not guard: {reason}")
        elif not allowed:
            hint = f"{name}; all functions to hook are there, but CANARY_PLUGINS does not name it"
            yield Check("plugins", plugin.name, "note", hint)
        elif config.mode == "off":
            yield Check("plugins", plugin.name, "bad", "would not guard: CANARY_MODE is off")
        else:
            yield Check("plugins", plugin.name, "ok", f"would guard {name}; all functions to hook are there")
    for missing in plugins.not_installed(config.plugins, (p.name for p in found)):
        yield Check("plugins", missing.name, "bad", str(missing.error))
    if not config.plugins:
        yield Check("plugins", "CANARY_PLUGINS", "note", "empty, so nothing is guarded")


def running(config: CanaryConfig) -> Iterator[Check]:
    """Guarded engines of this user with an answer now."""
    folder = config.control_folder()
    try:
        sockets = client.found(folder)
    except CanaryError:
        yield Check("control", "socket", "note", f"no guarded engine answers in {folder}")
        return
    yield Check("control", "socket", "ok", f"{', '.join(path.stem for path in sockets)} in {folder}")


def tried(device: torch.device) -> Iterator[Check]:
    """The self-test on ``device``."""
    for outcome in self_test.run(device):
        if outcome.error is not None:
            yield Check("self-test", outcome.what, "bad", f"Canary failed: {outcome.error}")
            continue
        found = ", ".join(outcome.found) or "nothing"
        text = f"{found} found"
        if outcome.expected and outcome.passed:
            text += f" after {outcome.seconds:.2f} s"
        elif not outcome.passed:
            text += f", {outcome.expected or 'nothing'} expected"
        yield Check("self-test", outcome.what, "ok" if outcome.passed else "bad", text)


def _why_not(plugin: plugins.Plugin, config: CanaryConfig) -> str | None:
    """Why ``plugin`` would not hook its engine; None if it would."""
    reason = plugin.error or plugins.refusal(plugin, config.untested)
    if reason is not None:
        return reason
    if "canary_install" not in plugin.hooks:
        return "it hooks no engine by itself"
    trial = new_manager()
    trial.register(plugin.target, name=plugin.name)
    try:
        wanted = [target for some in trial.hook.canary_targets() for target in some]
        missing = targets.problems(wanted)
    except Exception as error:
        return f"importing its engine failed: {error_text(error)}"
    return "; ".join(missing) or None


def _driver() -> str | None:
    """Version of NVIDIA's driver; None where there is none, or the system does not say."""
    if sys.platform != "linux":
        return None
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return f"NVIDIA {found[1]}" if found else None
