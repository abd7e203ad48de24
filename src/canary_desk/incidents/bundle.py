"""A bundle: the record of an incident, as a directory of JSON files, complete or absent.

| file            | content                                                                                           |
|-----------------|---------------------------------------------------------------------------------------------------|
| `manifest.json` | format, version, time, kind of the root, process, size and SHA-256 of each other file written     |
|                 | at the same time                                                                                  |
| `incident.json` | the root, the findings, counts by kind, the diagnoses                                             |
| `evidence.json` | of each slot looked at: record, fingerprints recorded and found, last events (``lives``); pattern |
|                 | of the bytes; their owner; the table's row                                                        |
| `history.json`  | earlier calls about slots, oldest first                                                           |
| `about.json`    | settings, versions, coverage, counters, regions                                                   |
| `events.jsonl`  | earlier events of Canary, one a line                                                              |
| `bytes.bin`     | only with ``CANARY_INCIDENT_BYTES``: the bytes of the slots in ``read``, source by source         |
| `after.json`    | added a second later: Canary's events since, and the incident's final counts                      |

Without ``CANARY_INCIDENT_TOKENS`` there is neither a token id nor a prefix hash, by which a token could be worked out.
Seeds of the process's own fingerprints are in the evidence, so that its check can be repeated; of a secret
(``CANARY_KEY_FILE``) only its id.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canary_core.errors import CanaryError, error_text
from canary_core.events import all_escaped
from canary_core.incident import Incident
from canary_core.kinds import registry
from canary_core.kinds.case import Copy, Pattern
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.ops import hashing
from canary_core.ops.fingerprint_keys import PUBLIC, FingerprintKeys
from canary_core.records import POSITION, Kind, Phase, State
from canary_core.violation import Violation
from canary_desk.incidents.evidence import Evidence, SourceFacts
from canary_desk.incidents.signature import Signature, signature
from canary_desk.incidents.slot_history import call_of, life_of

FORMAT, VERSION = "canary-incident", 3

OLDEST = 2
"""Oldest readable version. Bundles before 3 have no ``lives``."""

MOST_FILE_BYTES, MOST_JSON_BYTES, MOST_FILES = 64 << 20, 16 << 20, 32
"""A larger file is not read, nor a bundle of more files."""

MOST_NUMBER, MOST_PAGE_SLOTS = 1 << 64, 1 << 20
"""Bounds of the numbers that Canary writes, and of a page's size."""

PARTIAL = ".partial-"
"""Prefix of the name of an unfinished directory."""

PREFIX = "incident-"
"""How a bundle's name begins."""


class BundleError(CanaryError):
    """A directory is no bundle, or not a whole one; or no bundle could be written."""


@dataclass(slots=True, eq=False)
class Bundle:
    """A bundle as read. ``incident``, ``about``, ``events``, ``history``, ``after``: as in its files; ``after`` is
    empty where the engine ended before. ``evidence``: None where Canary had none."""

    path: Path
    manifest: dict[str, Any]
    incident: dict[str, Any]
    about: dict[str, Any]
    events: list[dict[str, Any]]
    history: list[dict[str, Any]]
    after: dict[str, Any]
    evidence: Evidence | None
    patterns: list[Pattern]

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """As worked out when the bundle was written."""
        told, known = self.incident["diagnoses"], registry.classes()
        return [Diagnosis(known.get(d["diagnosis"]) or _of_others(d), d["sure"], tuple(d["evidence"])) for d in told]

    @property
    def signature(self) -> Signature:
        """The sort of the incident, worked out from the bundle: older ones tell none."""
        incident = self.rebuilt()
        incident.diagnoses = tuple(self.diagnoses)
        return signature(incident, self.evidence, self.patterns)

    def rebuilt(self) -> Incident:
        """The incident, as far as the bundle tells."""
        root, *findings = (violation_of(f) for f in (self.incident["root"], *self.incident["findings"]))
        incident = Incident(root, number=self.incident["number"], told=True)
        for violation in findings:
            incident.add(violation)
        return incident


def _of_others(told: Mapping[str, Any]) -> Class:
    """The class of a diagnosis made by another release, by its name."""
    return Class(str(told["diagnosis"]), f"{told['diagnosis']}, a class of another release of Canary", (), ())


def read_bundle(path: Path) -> Bundle:
    """The bundle in directory ``path``. Raises `BundleError`, with the reason, for anything else, an incomplete one, or
    one of a newer Canary."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise BundleError(f"{path} {what}; give the directory that the event diagnosis names as bundle")
    if path.name.startswith(PARTIAL):
        raise BundleError(f"{path} was still being written when its process ended; it is no bundle")
    manifest = _read_json(path / "manifest.json", path)
    if manifest.get("format") != FORMAT:
        raise BundleError(f"{path} is no incident of Canary: its manifest says format {manifest.get('format')!r}")
    version = manifest.get("version")
    if not isinstance(version, int) or not OLDEST <= version <= VERSION:
        reads = f"this Canary reads {OLDEST} to {VERSION}"
        raise BundleError(f"{path} has version {version!r}, {reads}; use the Canary that wrote it, or a newer one")
    files = manifest.get("files")
    if not isinstance(files, dict) or len(files) > MOST_FILES:
        raise BundleError(f"{path} is not whole: its manifest lists no files, or more than Canary writes")
    for name, listed in files.items():
        _require_whole(path / Path(name).name, listed)
    try:
        return _bundle(path, manifest)
    except BundleError:
        raise
    except Exception as error:
        raise unlike(path, error) from error


def unlike(path: Path, error: Exception) -> BundleError:
    """The bundle in directory ``path`` has files of Canary's names with other content: reading it, or telling of it,
    failed with ``error``."""
    return BundleError(f"{path} does not hold what a bundle holds: {all_escaped(error_text(error)[:200])}")


def content(file: Path, most_bytes: int = MOST_FILE_BYTES) -> bytes:
    """Of a regular file of so many bytes at most: no pipe, device or link, which may have no end or be elsewhere.
    Raises OSError for any other, and where it can't be read."""
    if not stat.S_ISREG(os.lstat(file).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as opened:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
            raise OSError(errno.EFBIG, "it is larger than any that Canary writes")
        return opened.read(most_bytes)


def parsed(text: bytes) -> Any:
    """The value of ``text``, as JSON, with every text within escaped. Raises ValueError for anything else, and for what
    Canary never writes: deep nesting, very large numbers."""
    try:
        return all_escaped(json.loads(text, parse_int=_number))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _number(digits: str) -> int:
    number = int(digits) if len(digits) <= 20 else MOST_NUMBER
    if abs(number) >= MOST_NUMBER:
        raise ValueError("it has a larger number than any that Canary writes")
    return number


def _bundle(path: Path, manifest: dict[str, Any]) -> Bundle:
    evidence, seen = None, []
    history: list[dict[str, Any]] = []
    if "evidence.json" in manifest["files"]:
        raw = _read_json(path / "evidence.json", path)
        history = _read_json(path / "history.json", path)
        evidence = _evidence_of(raw, history, path)
        seen = [_pattern(p) for p in raw["patterns"]]
    events = [parsed(line) for line in content(path / "events.jsonl", MOST_JSON_BYTES).splitlines()]
    after = _read_json(path / "after.json", path) if os.path.lexists(path / "after.json") else {}
    incident = _read_json(path / "incident.json", path)
    bundle = Bundle(
        path, manifest, incident, _read_json(path / "about.json", path), events, history, after, evidence, seen
    )
    bundle.rebuilt()
    return bundle


def _read_json(file: Path, path: Path) -> Any:
    try:
        return parsed(content(file, MOST_JSON_BYTES))
    except FileNotFoundError as error:
        raise BundleError(f"{path} is no incident of Canary, or not a whole one: it has no {file.name}") from error
    except (ValueError, OSError) as error:
        raise BundleError(f"{path}: {file.name} can't be read: {error}") from error


def _require_whole(file: Path, listed: Mapping[str, Any]) -> None:
    try:
        found = content(file)
        if len(found) != listed["bytes"]:
            raise BundleError(f"{file.parent} is not whole: {file.name} has {len(found)} of {listed['bytes']} bytes")
        if hashlib.sha256(found).hexdigest() != listed["sha256"]:
            raise BundleError(f"{file.parent} is not what was written: {file.name} has another content")
    except (OSError, ValueError) as error:
        why = f"{file.name} is missing or can't be read ({error})"
        raise BundleError(f"{file.parent} is not whole: {why}") from error
    except (KeyError, TypeError) as error:
        raise BundleError(f"{file.parent} is not whole: its manifest says nothing of {file.name}") from error


def _evidence_of(raw: Mapping[str, Any], history: Sequence[Mapping[str, Any]], path: Path) -> Evidence:
    sources = tuple(SourceFacts(**s) for s in raw["sources"])
    columns, read = len(sources), list(raw["read"])
    for size in (raw["page_size"], *(call["page_slots"] for call in history)):
        if not 1 <= size <= MOST_PAGE_SLOTS:
            raise ValueError(f"pages of {size} slots")
    names = {int(writer): name for writer, name in raw["names"].items()}
    numbers = {name: writer for writer, name in names.items()}
    words: dict[str, Tensor] = {}
    if read:
        taken = bytearray(content(path / "bytes.bin"))
        start = 0
        for source in sources:
            size = len(read) * source.words * 4
            part = torch.frombuffer(taken, dtype=torch.int32, count=size // 4, offset=start)
            words[source.name], start = part.view(len(read), source.words), start + size
    return Evidence(
        raw["region"],
        raw["kind"],
        raw["slot_count"],
        raw["page_size"],
        sources,
        torch.tensor(raw["slots"], dtype=torch.int64, device="cpu"),
        torch.tensor(raw["records"], dtype=torch.int32, device="cpu").view(-1, 8),
        _numbers(raw["stored"], columns),
        _numbers(raw["found"], columns),
        read,
        words,
        [Copy(**c) for c in raw["copies"]],
        raw["looked_up"],
        raw["right_slot"],
        raw["reader_began"],
        [call_of(fields, raw["region"], numbers) for fields in history],
        {slot: life_of(rows) for slot, rows in zip(raw["slots"], raw.get("lives", ()), strict=False) if rows},
        names,
        raw["table"],
        raw.get("reader_last"),
        FingerprintKeys.of_told(raw["keys"]) if "keys" in raw else PUBLIC,
    )


def _pattern(raw: dict[str, Any]) -> Pattern:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}
    return Pattern(**values)


def _numbers(lines: Sequence[str], columns: int) -> Tensor:
    rows = [[hashing.signed(int(line[i * 16 : i * 16 + 16], 16)) for i in range(columns)] for line in lines]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(lines), columns)


def violation_of(fields: Mapping[str, Any]) -> Violation:
    """A finding from `Violation.fields`. Raises KeyError, TypeError or ValueError for anything else."""
    values = {name: fields[name] for name in Violation.__dataclass_fields__ if name in fields}
    values["kind"], values["phase"] = Kind[fields["kind"].upper()], Phase[fields["phase"].upper()]
    if "stored_state" in values:
        values["stored_state"] = State[fields["stored_state"].upper()]
    for name in ("stored_value", "found_value"):
        if isinstance(values.get(name), str):
            values[name] = hashing.signed(int(values[name], 16))
    return Violation(**values)


def state_of(record: Sequence[int]) -> str:
    """State of a record's slot, in a word."""
    return State.of(record[POSITION]).name.lower()
