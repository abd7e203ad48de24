"""A bundle is there as a whole or not at all, holds no text, and brings the diagnosis again by itself."""

import errno
import hashlib
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core.ops.histories import Happening
from canary_desk.explain import tell
from canary_desk.incidents import bundle_writer
from canary_desk.incidents.bundle import PARTIAL, BundleError, read_bundle
from canary_desk.incidents.bundle_writer import GIVEN_UP_S
from canary_desk.incidents.diagnosis import diagnose
from canary_desk.incidents.patterns import patterns
from canary_desk.incidents.rotation import Limits, rotate

SECRET = 7_654_321
"""A token id that occurs nowhere else."""


def broken(directory: Path, **settings: object) -> Guarded:
    """A toy engine in which a bit was flipped, with a bundle of it in ``directory``."""
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, incident_dir=str(directory), **settings)
    request = guarded.engine.submit("a", [SECRET + i for i in range(12)])
    guarded.canary.slots.alloc("full", torch.arange(1, 20), guarded.engine.writers.id("a"))
    guarded.step(8)
    guarded.engine.k[1].view(torch.int32)[request.slots[5], 3] ^= 1 << 9
    guarded.step(4)
    guarded.canary.drain()
    return guarded


def only(directory: Path) -> Path:
    """What is in ``directory``."""
    (path,) = directory.iterdir()
    return path


def test_what_is_in_a_bundle(tmp_path):
    """Incident, evidence, history of the slots, settings, versions, coverage, counters, events before; a second later
    what came after."""
    guarded = broken(tmp_path)
    guarded.canary.close()
    bundle = read_bundle(only(tmp_path))
    assert bundle.incident["root"]["source"] == "k.1"
    assert bundle.diagnoses[0].name == "flipped_bit"
    assert [entry["event"] for entry in bundle.history] == ["alloc"]
    assert bundle.history[0]["writer"] == "a"
    slot = bundle.incident["root"]["slot"]
    assert bundle.evidence.lives[slot] == [Happening(0, "alloc", 0), Happening(1, "write", 0)]
    assert bundle.evidence.names == {0: "a"}
    # Of the slots around as well.
    assert bundle.evidence.lives[slot + 1] == bundle.evidence.lives[slot]
    assert bundle.about["settings"]["CANARY_READ_CHECK"] == "-1"
    assert bundle.about["coverage"]["coverage_ratio"] == 1
    assert {"python", "torch"} <= bundle.about["versions"].keys()
    assert bundle.about["stats"]["checked_slots"] > 0
    # The first Canary of a process also tells of its control socket.
    assert [event["event"] for event in bundle.events][:2] == ["attached", "coverage"]
    assert [event["event"] for event in bundle.after["events"]][:1] == ["incident"] or bundle.after["findings"] == 1
    assert bundle.evidence is not None
    assert bundle.evidence.table is not None
    assert bundle.evidence.table["slots"][5] == bundle.incident["root"]["slot"]
    (event,) = guarded.findings.told("diagnosis")
    assert event.fields["bundle"] == str(only(tmp_path))


@pytest.mark.parametrize("content", [False, True])
def test_the_bundle_alone_brings_the_diagnosis_again(tmp_path, content):
    """From findings, fingerprints and what the bytes looked like; or from the bytes, where it has them."""
    broken(tmp_path, incident_bytes=content)
    bundle = read_bundle(only(tmp_path))
    seen = list(patterns(bundle.evidence)) if content else bundle.patterns
    assert seen == bundle.patterns
    assert list(diagnose(bundle.rebuilt(), bundle.evidence, seen)) == bundle.diagnoses


def test_a_diagnosis_of_another_release_is_read_by_its_name(tmp_path):
    """Its class is not known here: the rest of the bundle is worth as much as ever."""
    broken(tmp_path)
    bundle = read_bundle(only(tmp_path))
    bundle.incident["diagnoses"][0]["diagnosis"] = "gremlins"
    assert bundle.diagnoses[0].name == "gremlins"
    assert "gremlins, a class of another release of Canary" in bundle.diagnoses[0].sentence
    assert tell(bundle)


@pytest.mark.parametrize("asked", [False, True])
def test_no_token_is_in_it_unless_asked_for(tmp_path, asked):
    """Neither the id, nor a prefix hash from which it could be worked out, in any file."""
    guarded = broken(tmp_path, incident_tokens=asked)
    guarded.engine.requests[0].tokens[2] = 1
    guarded.decode()
    guarded.canary.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 2
    text = "".join(file.read_text() for path in paths for file in path.iterdir() if file.suffix != ".bin")
    # All but the last digit, which differs from token to token; so many that no time of day and no address has them.
    assert (str(SECRET)[:-1] in text) == asked
    hashes = {int(h) for row in guarded.canary.states["full"].records.tolist() for h in row[2:4] if h}
    assert any(f",{h}," in text for h in hashes) == asked


def test_bytes_are_in_it_only_if_asked_for(tmp_path):
    """Without, the bundle has fingerprints only."""
    broken(tmp_path / "without")
    broken(tmp_path / "with", incident_bytes=True)
    assert not (only(tmp_path / "without") / "bytes.bin").exists()
    assert (only(tmp_path / "with") / "bytes.bin").stat().st_size > 0


def test_of_very_many_the_newest_stay(tmp_path):
    """The directory takes each new one, and the oldest goes."""
    names = []
    for _ in range(4):
        broken(tmp_path, incident_most=2)
        names += [path.name for path in tmp_path.iterdir() if path.name not in names]
    # Of one second the names tell no order.
    assert len(list(tmp_path.iterdir())) == 2
    assert len(names) == 4


def kept(directory: Path, *bundles: tuple[str, str, int]) -> None:
    """Puts bundles of a kind, a time and a size there, under their kind and time."""
    for kind, written, size in bundles:
        path = directory / f"incident-{written}-{kind}"
        path.mkdir()
        manifest = {"format": "canary-incident", "written": f"{written}T00:00:00Z", "kind": kind, "files": {}}
        (path / "manifest.json").write_text(json.dumps(manifest))
        (path / "bytes.bin").write_bytes(bytes(size))


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (Limits(4, 1 << 20, 0), {"09-10-freed", "09-13-bytes", "09-14-bytes", "09-12-token"}),
        (Limits(1, 1 << 20, 0), {"09-10-freed", "09-14-bytes", "09-12-token"}),
        (Limits(9, 4500, 0), {"09-10-freed", "09-13-bytes", "09-14-bytes", "09-12-token"}),
        (Limits(9, 1, 0), {"09-10-freed", "09-14-bytes", "09-12-token"}),
        (Limits(9, 1 << 20, 0.5), {"09-10-freed", "09-14-bytes", "09-12-token"}),
        (Limits(9, 1 << 20, 0), {f"09-1{n}-bytes" for n in (1, 3, 4)} | {"09-10-freed", "09-09-freed", "09-12-token"}),
    ],
    ids=["number", "one", "size", "no size", "age", "none"],
)
def test_bundles_rotate_and_one_of_each_kind_and_the_newest_stay(tmp_path, limits, left):
    """The oldest of the most frequent kind goes first, until number and size are within the limits. Anything else in
    the directory is left alone."""
    kept(tmp_path, ("freed", "2020-09-10", 900), ("bytes", "2020-09-11", 900), ("token", "2020-09-12", 900))
    kept(tmp_path, ("bytes", "2020-09-13", 900), ("bytes", "2020-09-14", 900), ("freed", "2020-09-09", 900))
    (tmp_path / "incident-notes").mkdir()
    (tmp_path / "incident-link").symlink_to(tmp_path / "incident-2020-09-14-bytes")
    (tmp_path / "else").touch()
    rotate(tmp_path, limits, ".partial-")
    found = {path.name for path in tmp_path.iterdir()}
    assert found - {"incident-notes", "incident-link", "else"} == {f"incident-2020-{name}" for name in left}
    assert {"incident-notes", "incident-link", "else"} <= found


def test_only_its_user_can_read_a_bundle(tmp_path):
    """Whatever the umask; the directory is Canary's own only where Canary made it."""
    before = os.umask(0)
    try:
        broken(tmp_path / "bundles")
    finally:
        os.umask(before)
    path = only(tmp_path / "bundles")
    assert {stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent)} == {0o700}
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


@pytest.mark.parametrize("where", ["a file", "below a file"])
def test_a_directory_that_cannot_be_written_is_one_event(tmp_path, where):
    """The engine goes on, the incident is told and diagnosed."""
    file = tmp_path / "file"
    file.write_text("")
    guarded = broken(file if where == "a file" else file / "below")
    (event,) = guarded.findings.told("bundle_failed")
    assert event.level == "warning"
    assert "file" in event.fields["reason"]
    assert guarded.canary.enabled
    assert guarded.findings.told("diagnosis")[0].fields["diagnosis"] == "flipped_bit"


def test_a_full_disk_is_one_event_and_leaves_nothing(tmp_path, monkeypatch):
    """Whatever was written so far is removed."""
    put, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(handle)

    monkeypatch.setattr("canary_desk.incidents.bundle_writer.os.fsync", full)
    guarded = broken(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (event,) = guarded.findings.told("bundle_failed")
    assert "No space left" in event.fields["reason"]
    assert guarded.canary.enabled


WRITER = """
import os, sys
from pathlib import Path
from canary_desk.explain import tell
from canary_desk.incidents import bundle_writer
sys.path.insert(0, sys.argv[2])
put, calls = bundle_writer._put, []
def slow(path, content):
    put(path, content[: len(content) // 2])
    print("writing", flush=True)
    import time; time.sleep(60)
if sys.argv[3] == "slow":
    bundle_writer._put = slow
from test_bundle import broken
broken(Path(sys.argv[1]))
print("done", flush=True)
{end}
"""


def run(directory: Path, how: str, end: str = "") -> "subprocess.Popen[str]":
    """A process that writes a bundle, at once or ``slow``, and then does ``end``."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "tests"])}
    code = WRITER.format(end=end)
    command = [sys.executable, "-c", code, str(directory), str(Path(__file__).parent), how]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=root)


def test_a_process_that_is_killed_while_it_writes_leaves_no_half_bundle(tmp_path):
    """What it leaves is not named as a bundle, can't be read as one, and is removed by the next that writes, once it is
    old: until then it may be another machine's that looks like this one from within."""
    with run(tmp_path, "slow") as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    left = only(tmp_path)
    assert left.name.startswith(PARTIAL)
    with pytest.raises(BundleError, match="still being written"):
        read_bundle(left)
    broken(tmp_path)
    assert left.exists()
    for path in tmp_path.glob("incident-*"):
        shutil.rmtree(path)
    long_ago = time.time() - GIVEN_UP_S - 1
    os.utime(left, (long_ago, long_ago))
    broken(tmp_path)
    assert read_bundle(only(tmp_path)).diagnoses[0].name == "flipped_bit"


def test_bundles_of_processes_that_look_alike_have_names_of_their_own(tmp_path, monkeypatch):
    """Pods that share a directory: the same host, process and number, maybe within a second."""
    for _ in range(2):
        monkeypatch.setattr(bundle_writer, "_count", itertools.count(1))
        broken(tmp_path)
    # But for the time, which comes first, and what is random.
    alike = [path.name.split("-")[2:-1] for path in tmp_path.glob("incident-*")]
    assert len(alike) == 2
    assert alike[0] == alike[1]


def test_what_another_machine_is_writing_is_left_alone(tmp_path):
    """Nodes may share the directory: a process of theirs is not known here, and runs all the same."""
    others = tmp_path / f"{PARTIAL}another_node-999999-incident"
    others.mkdir()
    broken(tmp_path)
    assert others.exists()


def test_a_bundle_survives_the_crash_of_the_engine(tmp_path):
    """A process that dies right after the finding was looked at: the bundle is on the disk, without an aftermath."""
    with run(tmp_path, "fast", "os.kill(os.getpid(), 9)") as process:
        assert process.stdout.readline() == "done\n"
    assert process.returncode == -signal.SIGKILL
    bundle = read_bundle(only(tmp_path))
    assert bundle.after == {}
    assert bundle.incident["total"] == 1


def test_a_bundle_is_small(tmp_path):
    """Below 5 MB even where every slot of eighty layers is damaged."""
    guarded = Guarded(ToyEngine(slots=600, layers=80, row_elements=8), read_check=-1, incident_dir=str(tmp_path))
    guarded.engine.table = torch.zeros(16, 512, dtype=torch.int32)
    request = guarded.submit(tokens=400)
    guarded.step(396)
    for tensor in (*guarded.engine.k, *guarded.engine.v):
        tensor[request.slots] = torch.randn(len(request.slots), 8).to(tensor.dtype)
    guarded.step(4)
    guarded.canary.drain()
    bundle = read_bundle(only(tmp_path))
    assert sum(file.stat().st_size for file in bundle.path.iterdir()) < 5_000_000


def changed(path: Path, how: str) -> None:
    """A bundle that somebody, or a disk, has changed."""
    if how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "foreign":
        (path / "manifest.json").write_text('{"format": "something"}')
    elif how == "newer":
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    elif how == "truncated":
        (path / "evidence.json").write_bytes((path / "evidence.json").read_bytes()[:-40])
    elif how == "changed":
        content = (path / "incident.json").read_bytes()
        (path / "incident.json").write_bytes(content.replace(b'"k.1"', b'"v.1"'))
    elif how == "missing":
        (path / "history.json").unlink()
    elif how == "not json":
        (path / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no manifest", "no incident of Canary"),
        ("foreign", "format 'something'"),
        ("newer", "version 99"),
        ("truncated", "not whole: evidence.json"),
        ("changed", "another content"),
        ("missing", "history.json is missing"),
        ("not json", "manifest.json can't be read"),
    ],
)
def test_a_bundle_that_is_none_is_refused_with_a_sentence(tmp_path, how, says):
    """Truncated, changed, of another program, of a newer Canary."""
    broken(tmp_path)
    path = only(tmp_path)
    changed(path, how)
    with pytest.raises(BundleError, match=says):
        read_bundle(path)


def test_a_bundle_of_an_older_canary_is_read(tmp_path):
    """One of version 2, without what the device noted: the same diagnosis."""
    broken(tmp_path)
    path = only(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    evidence = json.loads((path / "evidence.json").read_text())
    del evidence["lives"]
    content = json.dumps(evidence).encode()
    manifest["files"]["evidence.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "evidence.json").write_bytes(content)
    (path / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    bundle = read_bundle(path)
    assert bundle.evidence.lives == {}
    assert list(diagnose(bundle.rebuilt(), bundle.evidence, bundle.patterns)) == bundle.diagnoses


@pytest.mark.parametrize(("name", "says"), [("nothing", "does not exist"), ("file", "is a file")])
def test_what_is_no_directory_is_refused(tmp_path, name, says):
    """With its name."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match=says):
        read_bundle(tmp_path / name)
