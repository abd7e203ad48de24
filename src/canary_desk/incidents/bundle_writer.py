"""Writes a bundle, and later its aftermath: see `bundle`."""

import hashlib
import itertools
import json
import os
import platform
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from canary_core import installed
from canary_core.events import Event
from canary_core.incident import Incident
from canary_core.kinds.case import Pattern
from canary_core.records import PREFIX_HASH, TOKEN
from canary_core.wording import by_name
from canary_desk.incidents.bundle import FORMAT, PARTIAL, PREFIX, VERSION
from canary_desk.incidents.circumstances import Circumstances
from canary_desk.incidents.evidence import Evidence
from canary_desk.incidents.rotation import Limits, rotate
from canary_desk.incidents.signature import content_digest
from canary_desk.incidents.slot_history import call_fields, life_rows

MOST_CELLS = 60_000
"""Most slots times sources in one bundle, for less than 5 MB."""

GIVEN_UP_S = 600.0
"""Age of a half-written bundle without a writer any more, whatever machine or container it is of."""

_count = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class Dossier:
    """An incident with all known facts."""

    incident: Incident
    evidence: Evidence | None
    patterns: Sequence[Pattern]
    circumstances: Circumstances


def write_bundle(directory: Path, dossier: Dossier, limits: Limits) -> Path:
    """Writes a bundle into ``directory``, made if need be, and returns its path. A directory of another name is filled,
    brought to the disk and then renamed, so every visible bundle is complete. Only this user can read it. Then the
    directory is rotated by ``limits``.

    Raises OSError where nothing can be written; nothing is left behind then.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(directory)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    # One process may have several Canaries, each with an incident 1. Pods that share a folder may have processes of the
    # same number, and the name of one host.
    name = f"{PREFIX}{stamp}-{_host()}-{os.getpid()}-{next(_count)}-{secrets.token_hex(3)}"
    partial = directory / f"{_own()}{os.getpid()}-{name}"
    partial.mkdir(mode=0o700)
    try:
        files = _files(dossier)
        for file, content in files.items():
            _put(partial / file, content)
        _put(partial / "manifest.json", _manifest(files, dossier.incident))
        _to_disk(partial)
        os.rename(partial, directory / name)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    rotate(directory, limits, f"{_own()}{os.getpid()}-old-")
    _to_disk(directory)
    return directory / name


def write_aftermath(path: Path, incident: Incident, events: Iterable[tuple[float, Event]]) -> None:
    """Adds ``after.json`` to a bundle, whole or not at all. Raises OSError on failure."""
    after = {
        "findings": incident.total,
        "kinds": by_name(incident.kinds),
        "last_step": incident.last_step,
        **({"repaired": incident.repaired} if incident.repaired else {}),
        "events": [_event(moment, event) for moment, event in events],
    }
    partial = path / ".after.json"
    _put(partial, _json(after))
    os.rename(partial, path / "after.json")


def _sweep(directory: Path) -> None:
    """Removes half-written bundles of killed processes of this machine, once `GIVEN_UP_S` old: others may write here,
    too, and two machines may look alike from within."""
    for left in directory.glob(f"{_own()}*"):
        process = left.name.removeprefix(_own()).partition("-")[0]
        if process.isdigit() and int(process) != os.getpid() and not _runs(int(process)) and _is_old(left):
            shutil.rmtree(left, ignore_errors=True)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > GIVEN_UP_S
    except OSError:
        return False


def _own() -> str:
    """Prefix of names for this machine's next bundles; of a container, which numbers its processes anew."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{PARTIAL}{_host()}-{space}-"


def _host() -> str:
    return "".join(c if c.isalnum() else "_" for c in socket.gethostname())[:64]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _put(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _to_disk(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _json(value: object) -> bytes:
    return json.dumps(value, default=str, separators=(",", ":")).encode()


def _manifest(files: Mapping[str, bytes], incident: Incident) -> bytes:
    listed = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in files.items()}
    about = {"format": FORMAT, "version": VERSION, "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return _json({**about, "kind": incident.root.kind.name.lower(), "process": os.getpid(), "files": listed})


def _files(dossier: Dossier) -> dict[str, bytes]:
    circumstances, evidence = dossier.circumstances, dossier.evidence
    files = {
        "incident.json": _json(_incident(dossier)),
        "about.json": _json({**circumstances.about, "versions": versions()}),
        "events.jsonl": b"".join(_json(_event(*told)) + b"\n" for told in circumstances.events),
    }
    if evidence is not None:
        files["evidence.json"] = _json(_evidence(evidence, dossier.patterns, circumstances))
        files["history.json"] = _json([call_fields(call, evidence.names) for call in evidence.history])
        if circumstances.content:
            files["bytes.bin"] = b"".join(bytes(evidence.words[s.name].numpy().tobytes()) for s in evidence.sources)
    return files


def versions() -> dict[str, str]:
    """Versions of Python, the machine, and installed packages of Canary and engines."""
    out = {"python": sys.version.split()[0], "platform": f"{platform.system()} {platform.machine()}"}
    out |= installed.versions(("canary-core", "torch", "triton", "sglang", "vllm", "transformers", "flashinfer-python"))
    if torch.cuda.is_available():
        out["device"] = torch.cuda.get_device_name()
    return out


def _incident(dossier: Dossier) -> dict[str, object]:
    incident = dossier.incident
    return {
        "number": incident.number,
        "root": incident.root.fields(),
        "findings": [v.fields() for v in incident.findings],
        "total": incident.total,
        "kinds": by_name(incident.kinds),
        "last_step": incident.last_step,
        "requests": list(incident.requests),
        "diagnoses": [d.fields() for d in incident.diagnoses],
        "signature": incident.signature,
        "suppressed": incident.suppressed,
        "content": content_digest(incident, dossier.evidence),
        **({"traces": incident.trace_ids} if incident.traces else {}),
    }


_PLACES = ("bundle", "directory")
"""Fields of events with paths."""


def _event(moment: float, event: Event) -> dict[str, object]:
    fields = {k: v for k, v in event.fields.items() if k not in _PLACES}
    return {"time": round(moment, 6), "event": event.name, "level": event.level, **fields}


def _evidence(evidence: Evidence, seen: Sequence[Pattern], circumstances: Circumstances) -> dict[str, object]:
    rows = max(8, min(len(evidence.slots), MOST_CELLS // max(len(evidence.sources), 1)))
    records = evidence.records[:rows].clone()
    if not circumstances.tokens:
        records[:, [TOKEN, PREFIX_HASH, PREFIX_HASH + 1]] = 0
    return {
        "region": evidence.region,
        "kind": evidence.kind,
        "slot_count": evidence.slot_count,
        "page_size": evidence.page_size,
        "sources": [asdict(s) for s in evidence.sources],
        "slots": evidence.slots[:rows].tolist(),
        "records": records.tolist(),
        "stored": _hex(evidence.stored[:rows]),
        "found": _hex(evidence.found[:rows]),
        "read": [row for row in evidence.read if row < rows] if circumstances.content else [],
        "patterns": [asdict(p) for p in seen],
        "copies": [asdict(c) for c in evidence.copies],
        "looked_up": evidence.looked_up,
        "right_slot": evidence.right_slot,
        "reader_began": evidence.reader_began,
        "reader_last": evidence.reader_last,
        "table": evidence.table,
        "lives": [life_rows(evidence.lives.get(slot, ())) for slot in evidence.slots[:rows].tolist()],
        **({} if evidence.keys is None else {"keys": evidence.keys.told()}),
        "names": {str(writer): name for writer, name in evidence.names.items()},
    }


def _hex(values: Tensor) -> list[str]:
    """One line of 16 digits for each value, a row's values one after the other."""
    return ["".join(f"{v & (1 << 64) - 1:016x}" for v in row) for row in values.tolist()]
