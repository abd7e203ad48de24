"""`Suppressions`: incidents that nobody needs to act on, by signature: of a file, and acknowledged by an operator."""

import stat
from fnmatch import fnmatchcase
from pathlib import Path

from canary_core.errors import CanaryError
from canary_desk.incidents.signature import Signature

MOST_BYTES = 1 << 20
"""Largest file that is read."""

MOST_ACKNOWLEDGED = 1024
"""Most signatures acknowledged in one process."""


class Suppressions:
    """``path``: a file with a pattern a line, empty for none: the text of a signature, with ``*`` and ``?`` as in a
    shell, or its id; what follows ``#`` is the reason. Read anew for each incident, so an edit needs no restart."""

    def __init__(self, path: str) -> None:
        self._path = path

    def reason(self, sort: Signature) -> str:
        """Why an incident of this sort needs nobody; empty where it does. Raises `CanaryError` where the file can't be
        read: nothing of it holds then."""
        if sort.text in ACKNOWLEDGED or sort.id in ACKNOWLEDGED:
            return "acknowledged by canary ctl ack"
        for line in self._lines():
            pattern, _, why = (part.strip() for part in line.partition("#"))
            if pattern and (pattern == sort.id or fnmatchcase(sort.text, pattern)):
                return f"suppressed by {pattern}" + (f": {why}" if why else "")
        return ""

    def _lines(self) -> list[str]:
        if not self._path:
            return []
        try:
            found = Path(self._path).stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
                raise CanaryError(f"CANARY_SUPPRESSIONS: {self._path} is no regular file of at most {MOST_BYTES} bytes")
            return Path(self._path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise CanaryError(f"CANARY_SUPPRESSIONS: {self._path} can't be read: {error}") from error


ACKNOWLEDGED: dict[str, None] = {}
"""Texts and ids of signatures that an operator has acknowledged in this process."""


def acknowledge(signature: str) -> None:
    """Incidents of ``signature``, a text or an id, need nobody in this process from now on; from any thread. Raises
    `CanaryError` for anything else, or beyond `MOST_ACKNOWLEDGED`."""
    hexadecimal = len(signature) == 12 and set(signature) <= set("0123456789abcdef")
    if not hexadecimal and signature.count(":") != 4:
        raise CanaryError(f"{signature!r} is no signature; take the field signature or signature_id of a diagnosis")
    if len(ACKNOWLEDGED) >= MOST_ACKNOWLEDGED:
        raise CanaryError(f"{MOST_ACKNOWLEDGED} signatures are acknowledged; use a file (CANARY_SUPPRESSIONS)")
    ACKNOWLEDGED[signature] = None
