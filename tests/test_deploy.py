"""The files of docs/deploy.md: well formed by their own tools' schemas, with settings that exist, each explained."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from canary_core.config import CanaryConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples" / "deploy"
FILES = sorted(file for file in DEPLOY.rglob("*") if file.is_file())


def test_only_settings_that_exist_are_set():
    """A variable that was renamed is renamed here, too."""
    known = {f"CANARY_{name.upper()}" for name in CanaryConfig.model_fields}
    named = {name for file in FILES for name in re.findall(r"\bCANARY_[A-Z_]+", file.read_text())}
    assert named
    assert named <= known


def test_every_file_is_explained():
    """In docs/deploy.md, by its path."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert [str(f.relative_to(ROOT)) for f in FILES if str(f.relative_to(DEPLOY)) not in page] == []


def test_the_manifests_fit_kubernetes():
    """By the schema of a release, with unknown fields refused (pip install kubernetes-validate)."""
    validate = pytest.importorskip("kubernetes_validate").validate
    yaml = pytest.importorskip("yaml")
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert [each["kind"] for each in found] == ["PersistentVolumeClaim", "Secret", "Deployment"]
    for manifest in found:
        validate(manifest, "1.30", strict=True)


def test_compose_mounts_what_exists():
    """Each file of ours that a service mounts, the rules and the dashboard of ``monitoring/`` among them."""
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounted = [v.split(":")[0] for s in services.values() for v in s.get("volumes", ()) if v.startswith(".")]
    assert {Path(path).name for path in mounted} >= {"alerts.yml", "grafana.json", "prometheus.yml"}
    assert [path for path in mounted if not (DEPLOY / path).is_file()] == []


def test_compose_fits_its_specification():
    """By the models of the compose specification (pip install compose-spec)."""
    specification = pytest.importorskip("compose_spec")
    yaml = pytest.importorskip("yaml")
    specification.ComposeSpecification.model_validate(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_takes_its_settings(tmp_path):
    """With the rules beside them, as compose mounts both."""
    shutil.copy(DEPLOY / "prometheus.yml", tmp_path)
    shutil.copy(ROOT / "monitoring" / "alerts.yml", tmp_path)
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_the_unit(tmp_path):
    """No unknown section or key."""
    unit = tmp_path / "engine.service"
    unit.write_text(re.sub("ExecStart=.*", "ExecStart=/bin/true", (DEPLOY / "engine.service").read_text()))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "Unknown" not in done.stderr
    assert str(unit) not in done.stderr
