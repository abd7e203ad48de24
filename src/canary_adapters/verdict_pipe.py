"""Verdicts of workers on their way to their scheduler's process: `VerdictPipe` there, `VerdictPost` in each worker,
`VerdictWay` for both."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from canary_adapters.block_events import BlockGroup
from canary_core import Phase, Verdict

PIPE_BYTES = 1 << 20
"""Room for some thousands of verdicts not taken yet by the scheduler. Further ones become one verdict for all KV, with
those that are there."""


@dataclass(frozen=True, slots=True)
class BlockVerdict:
    """A `Verdict` in blocks, as plain values. block: number of the pool's block, -1 for none. request: the reader's
    name in findings, None if unknown. spoiled, stands: as in `Verdict`. step: number of the forward that reads the
    block next, or wrote it; 0 if unknown. Without block and request: all KV."""

    kind: str
    region: str = ""
    slot: int = -1
    block: int = -1
    request: str | None = None
    spoiled: bool = True
    stands: bool = False
    step: int = 0

    @property
    def everything(self) -> bool:
        """Whether the wrong KV is unknown."""
        return self.block < 0 and self.request is None

    @property
    def of_all(self) -> bool:
        """Whether the block is wrong for every reader."""
        return self.block >= 0 and (self.spoiled or self.request is None)

    @property
    def about(self) -> dict[str, object]:
        """Fields of an event."""
        return {"kind": self.kind, "region": self.region, "slot": self.slot, "block": self.block}

    @classmethod
    def of(cls, verdict: Verdict, groups: Iterable[BlockGroup]) -> "BlockVerdict | None":
        """``groups``: the guarded ones. None for a finding without a known block or request, or of an unguarded
        region."""
        finding, slot = verdict.finding, verdict.slot
        if finding is None:
            return cls("findings_lost")
        group = next((group for group in groups if group.region == finding.region), None)
        if group is None or (slot is None and finding.request is None):
            return None
        return cls(
            kind=finding.kind.name.lower(),
            region=finding.region,
            slot=-1 if slot is None else slot,
            block=-1 if slot is None else slot // group.block,
            request=finding.request,
            spoiled=verdict.spoiled,
            stands=verdict.stands,
            # What is found between two forwards has the number of the one before.
            step=finding.step + (finding.phase is Phase.EVENT),
        )


class VerdictPipe:
    """The end of a named pipe in the scheduler's process; workers of the same machine open a `VerdictPost` at ``path``.
    `opened` removes the name, so that no file is left however the process ends."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="canary-verdicts-"))
        self.path = str(self._folder / "pipe")
        os.mkfifo(self.path, 0o600)
        self._end = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self._end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._rest = b""
        self._named, self._over = True, False

    def opened(self) -> None:
        """All workers have opened the pipe, or never will: removes the name."""
        self._named = False
        with contextlib.suppress(OSError):
            os.unlink(self.path)
            self._folder.rmdir()

    def take(self) -> list[BlockVerdict]:
        """The verdicts since the last call, by a read that never waits. With one for all KV where the pipe may have
        been full, so that others were lost."""
        found = []
        while not self._over:
            try:
                data = os.read(self._end, PIPE_BYTES)
            except BlockingIOError:
                break
            if not data:
                # Nobody has it open, as where all workers are in this process. Without a name nobody ever will.
                self._over = not self._named
                break
            found.append(data)
        if not found:
            return []
        *lines, self._rest = (self._rest + b"".join(found)).split(b"\n")
        verdicts = [_read(json.loads(line)) for line in lines]
        # The kernel begins a page for a line that the last one has no room for. So any two pages of a full pipe have
        # more than one page of lines, unless a single page is all that it has.
        if sum(map(len, found)) >= self._size // 2:
            verdicts.append(BlockVerdict("findings_lost"))
        return verdicts

    @property
    def _size(self) -> int:
        try:
            return fcntl.fcntl(self._end, fcntl.F_GETPIPE_SZ)
        except (OSError, AttributeError):
            return PIPE_BYTES

    def close(self) -> None:
        """Ends the scheduler's side."""
        self.opened()
        with contextlib.suppress(OSError):
            os.close(self._end)


class VerdictWay:
    """Verdicts of one process's workers on their way to schedulers here or elsewhere, by `VerdictPipe` and
    `VerdictPost`."""

    def __init__(self) -> None:
        self._pipes: dict[int, VerdictPipe] = {}
        self._here: dict[int, list[BlockVerdict]] = {}
        self.post: VerdictPost | None = None
        """The way to the scheduler's process, None where the scheduler is in this one."""

    def joined(self, engine: object) -> None:
        """A scheduler of ``engine`` runs in this process."""
        self._here[id(engine)] = []

    def put(self, verdict: BlockVerdict, engine: object) -> bool:
        """Sends ``verdict`` on KV of ``engine``, or keeps it for the engine's scheduler here. Returns whether there is
        any."""
        here = self._here.get(id(engine))
        if here is not None:
            here.append(verdict)
        elif self.post is not None:
            self.post.put(verdict)
        return here is not None or self.post is not None

    def pipe(self, engine: object) -> VerdictPipe:
        """In the scheduler's process: a pipe to be opened by workers of ``engine`` in other processes."""
        self._pipes[id(engine)] = pipe = VerdictPipe()
        return pipe

    def open(self, path: str) -> bool:
        """In a worker: opens the pipe at ``path``, unless this process made the pipe. Returns whether the scheduler's
        process can be reached."""
        if any(pipe.path == path for pipe in self._pipes.values()):
            return True
        try:
            self.post = VerdictPost(path)
        except OSError:
            return False
        return True

    def take(self, engine: object) -> list[BlockVerdict]:
        """Verdicts for ``engine``, of other processes and of this one, since the last call."""
        pipe, here = self._pipes.get(id(engine)), self._here.get(id(engine), [])
        found = [] if pipe is None else pipe.take()
        while here:
            # Another thread may add some meanwhile.
            found.append(here.pop(0))
        return found

    def left(self, engine: object) -> None:
        """The scheduler of ``engine`` has ended."""
        self._here.pop(id(engine), None)
        pipe = self._pipes.pop(id(engine), None)
        if pipe is not None:
            pipe.close()

    def close(self) -> None:
        """Ends all."""
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes.clear()
        self._here.clear()
        if self.post is not None:
            self.post.close()
            self.post = None


class VerdictPost:
    """A worker's end of the pipe at ``path``. Raises `OSError` without a pipe there, as on another machine."""

    def __init__(self, path: str) -> None:
        self._end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    def put(self, verdict: BlockVerdict) -> None:
        """Sends ``verdict``, ready for the scheduler's process when the call returns. Never waits: of a full pipe the
        scheduler's side takes a verdict for all KV."""
        with contextlib.suppress(BlockingIOError):
            # A line shorter than PIPE_BUF is written as a whole, or not at all.
            os.write(self._end, json.dumps(asdict(verdict)).encode() + b"\n")

    def close(self) -> None:
        """Ends the worker's side."""
        with contextlib.suppress(OSError):
            os.close(self._end)


def _read(line: Mapping[str, object]) -> BlockVerdict:
    known = {field.name for field in fields(BlockVerdict)}
    return BlockVerdict(**{name: value for name, value in line.items() if name in known})  # type: ignore[arg-type]
