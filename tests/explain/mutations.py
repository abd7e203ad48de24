"""``python tests/explain/mutations.py [NUMBER] [SEED]``: `canary explain` on bundles with something wrong in each.
Prints the number that were refused, or explained all the same, and the seeds of those that failed."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.guarded import Guarded
from support.toy import ToyEngine
from typer.testing import CliRunner

from canary_desk.cli.app import app

PATIENCE_S = 20
NASTY = (
    None, True, -1, 0, 1 << 31, (1 << 63) - 1, -(1 << 63), 1 << 70, 1e308, float("nan"), "", "x" * 5000,
    "\x1b[2J\n\u202e", "<script>", [], {}, [[]], [None], {"a": {}}, [0] * 3000, "../../etc/passwd", "9" * 5000,
    [1 << 62], "bytes", "freed",
)  # fmt: skip
OPTIONS = ([], ["--check"], ["--report"], ["--html"])


def bundle(folder: Path) -> Path:
    """Of the toy engine, with content and tokens."""
    guarded = Guarded(
        ToyEngine(layers=2), read_check=-1, incident_dir=str(folder), incident_bytes=True, incident_tokens=True
    )
    request = guarded.engine.submit("alice", list(range(100, 112)))
    guarded.step(8)
    guarded.engine.k[1].view(torch.int32)[request.slots[5], 3] ^= 1 << 30
    guarded.step(4)
    guarded.canary.close()
    (path,) = folder.iterdir()
    return path


def mutate(path: Path, chance: random.Random) -> None:
    """Changes one or several things in the bundle ``path``."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        # What is no plain file any more is left as it is: reading a pipe would wait for ever.
        plain = sorted(
            f.name for f in path.iterdir() if f.is_file() and not f.is_symlink() and f.stat().st_size < 1 << 24
        )
        if not plain:
            return
        name = chance.choice(plain)
        how = chance.choice((_value, _value, _value, _value, _bytes, _bytes, _file))
        with contextlib.suppress(ValueError, RecursionError, OSError):
            how(path / name, chance)
    if chance.random() < 0.9:
        _fit(path)


def _value(file: Path, chance: random.Random) -> None:
    """A value at any depth of the JSON becomes another, goes, or is nested deep."""
    if file.suffix == ".jsonl":
        lines = file.read_text().splitlines()
        place = chance.randrange(len(lines))
        lines[place] = _changed(lines[place], chance)
        file.write_text("\n".join(lines))
    else:
        file.write_text(_changed(file.read_text(), chance))


def _changed(text: str, chance: random.Random) -> str:
    value = json.loads(text)
    if chance.random() < 0.05:
        return "[" * chance.choice((500, 5000, 200_000)) + text
    inside, holders = value, []
    while isinstance(inside, (dict, list)) and inside:
        key: Any = chance.choice(list(inside)) if isinstance(inside, dict) else chance.randrange(len(inside))
        holders.append((inside, key))
        inside = inside[key]
    if not holders:
        return json.dumps(chance.choice(NASTY))
    holder, key = chance.choice(holders)
    if chance.random() < 0.2:
        del holder[key]
    elif isinstance(holder[key], int) and chance.random() < 0.4:
        holder[key] = holder[key] * chance.choice((-1, 7, 1 << 20, 1 << 40)) + chance.choice((-1, 0, 1))
    else:
        holder[key] = chance.choice(NASTY)
    return json.dumps(value)


def _bytes(file: Path, chance: random.Random) -> None:
    """Some are flipped, cut off, or put there twice."""
    content = bytearray(file.read_bytes())
    place = chance.randrange(len(content) + 1)
    how = chance.randrange(3)
    if how == 0 and place < len(content):
        content[place] ^= 1 << chance.randrange(8)
    elif how == 1:
        del content[place:]
    else:
        content[place:place] = content[place : place + chance.randrange(200)]
    file.write_bytes(content)


def _file(file: Path, chance: random.Random) -> None:
    """Becomes a pipe, a device, a link, a folder, a hole of a gigabyte, or nothing."""
    file.unlink()
    how = chance.randrange(7)
    if how == 0:
        os.mkfifo(file)
    elif how == 1:
        file.symlink_to("/dev/zero")
    elif how == 2:
        file.symlink_to("/etc/hostname")
    elif how == 3:
        file.mkdir()
    elif how == 4:
        with file.open("wb") as hole:
            hole.truncate(1 << 30)
    elif how == 5:
        file.write_bytes(b"")


def _fit(path: Path) -> None:
    """The manifest says of each file what there is, so that its content is looked at."""
    manifest = path / "manifest.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError, AttributeError):
        if manifest.is_symlink() or not manifest.is_file() or manifest.stat().st_size > 1 << 24:
            return
        told = json.loads(manifest.read_text())
        for name in list(told["files"]):
            file = path / name
            if file.is_file() and not file.is_symlink() and file.stat().st_size < 1 << 24:
                content = file.read_bytes()
                told["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest.write_text(json.dumps(told))


def outcome(path: Path, options: list[str]) -> str:
    """``explained``, ``differs``, ``refused``, or the failure."""
    page = str(path.parent / "page.html")
    arguments = ["explain", str(path), *options, *([page] if options == ["--html"] else [])]
    with _patience():
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"traceback {result.exception!r}"
    lines = result.stderr.splitlines()
    if result.exit_code == 2:
        one = len(lines) == 1 and lines[0].startswith("canary: ") and lines[0].isprintable()
        return "refused" if one and not result.stdout else f"not one sentence: {result.output[:300]!r}"
    if not all(line.isprintable() for line in result.stdout.splitlines()):
        return "an escape on the terminal"
    return "explained" if result.exit_code == 0 else "differs" if "--check" in options else f"code {result.exit_code}"


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcomes(number: int, seed: int = 0) -> Iterator[tuple[int, str]]:
    """Seed and outcome of each of so many mutations."""
    with tempfile.TemporaryDirectory() as folder:
        whole = bundle(Path(folder, "whole"))
        for one in range(seed, seed + number):
            chance = random.Random(one)
            path = Path(folder, "incident-mutated")
            shutil.copytree(whole, path)
            mutate(path, chance)
            yield one, outcome(path, chance.choice(OPTIONS))
            shutil.rmtree(path)


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    for which, what in outcomes(*map(int, sys.argv[1:])):
        counts[what if what in ("explained", "refused", "differs") else "FAILED"] += 1
        if what not in ("explained", "refused", "differs"):
            sys.stdout.write(f"{which} {what}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{dict(counts)}\n")
