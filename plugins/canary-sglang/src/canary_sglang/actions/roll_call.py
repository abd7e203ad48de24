"""`RanksRollCall`: the ranks of an engine inform each other of their guard, and one reports the unguarded."""

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from canary_adapters import RollCall, answer, default_store
from canary_core import AttachError, Canary, CanaryConfig, may_recompute
from canary_core import __version__ as core_version
from canary_sglang.compat.ranks import ReplicaRank
from canary_sglang.version import __version__

LOOK_S = 10.0
"""Seconds after the start of the rank's engine until a silent rank counts as unguarded. SGLang's ranks wait for each
other when allocating pools, and a rank's word comes before its first forward."""

ATTACH_S = 600.0
"""Longest time for a rank to attach, after announcing the attempt."""

WAIT_S = 0.25

ACTS = "acts"
"""Acts on findings (``CANARY_ON_VIOLATION``)."""

RECOMPUTES = "recomputes"
"""Has requests computed again, or remembers prefixes for that (``CANARY_RECOMPUTE``, ``CANARY_CONTROL=write``)."""

VERSION = f"{core_version}, canary-sglang {__version__}"
ADVICE = "SGLang's processes have the environment of the command that starts them, on each machine its own"
NOT_GUARDED = "has not said that it is guarded: there Canary is not installed, not asked for, or failed to start"


class RanksRollCall:
    """Words of the ranks of one torch.distributed world about themselves in its store, each under a key of its own. No
    rank waits for another one, and there is no collective: an unguarded rank would not take part.

    ``config``: the settings of this process. ``places``: of all ranks, by world rank; ``own``: this one's world rank.
    ``store``: by default that of torch.distributed's first group. The first rank present looks, `LOOK_S` after `begin`,
    and reports ``workers_unguarded`` events. In raise mode `require` raises, so that the engine stops.
    """

    def __init__(self, config: CanaryConfig, places: Sequence[ReplicaRank], own: int, store: Any = None) -> None:
        self._config = config
        self._places = places
        self._own = own
        self._store = store if store is not None or len(places) == 1 else default_store()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._problem: AttachError | None = None

    def arrive(self) -> None:
        """The rank begins to attach."""
        self._say({})

    def say(self, canary: Canary | None, reason: str = "") -> None:
        """The rank is guarded by ``canary``, or unguarded, for ``reason``; empty where there is nothing to guard."""
        if self._store is not None:
            ways = _ways(self._config, canary is not None and canary.enabled)
            self._say({**answer(self._config, VERSION, canary, reason), "ways": ways})

    def begin(self) -> None:
        """The engine has started. Again: does nothing."""
        if self._thread is None and self._store is not None:
            self._thread = threading.Thread(target=self._look, name="canary-roll-call", daemon=True)
            self._thread.start()

    def require(self, wait: bool = False) -> None:
        """Raises `AttachError` in raise mode if ranks are not guarded. ``wait``: until the answer is known, so that a
        short run does not pass unguarded."""
        if wait and self._thread is not None and self._config.mode == "raise":
            self._thread.join()
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Nobody looks any more."""
        self._over.set()

    def together(self, what: str = ACTS) -> bool:
        """Whether all ranks do ``what`` (`ACTS` on findings, or `RECOMPUTES`) in the same way, and so may wait for each
        other: the same answer on all ranks, given by the first. Waits for the answer. Not to be asked by a rank without
        a way of doing so. Without a known store assumed for `ACTS`."""
        try:
            return what == ACTS if self._store is None else self._together(what)
        except Exception:
            # A store that is gone.
            return False

    def _together(self, what: str) -> bool:
        key = _key(f"together/{what}")
        if self._own == 0:
            ways = {_way(given, what) for given in self._wait()}
            self._store.set(key, b"yes" if len(ways) == 1 and not ways & {None, ""} else b"no")
        began = time.monotonic()
        while not self._store.check([key]):
            first, waited = self._read(0), time.monotonic() - began
            if waited > (LOOK_S if first is None else ATTACH_S) or (first and not _way(first, what)):
                return False
            time.sleep(WAIT_S)
        return bytes(self._store.get(key)) == b"yes"

    def _say(self, given: dict[str, object]) -> None:
        if self._store is not None:
            try:
                self._store.set(_key(self._own), json.dumps(given).encode())
            except Exception:
                # Other ranks will say so.
                self._store = None

    def _read(self, rank: int) -> dict[str, Any] | None:
        """A rank's word; empty while attaching, None for silence."""
        if not self._store.check([_key(rank)]):
            return None
        said: dict[str, Any] = json.loads(bytes(self._store.get(_key(rank))))
        return said

    def _wait(self) -> list[dict[str, Any] | None]:
        """The words of all ranks, complete or after the time limit."""
        began = time.monotonic()
        while True:
            said = [self._read(rank) for rank in range(len(self._places))]
            late = LOOK_S if None in said else ATTACH_S
            if all(said) or time.monotonic() - began > late or self._over.wait(WAIT_S):
                return said

    def _look(self) -> None:
        try:
            said = self._wait()
        except Exception:
            # The engine has ended, and the store with it.
            return
        there = [rank for rank, given in enumerate(said) if given is not None]
        # Where no rank is guarded, each has told why.
        if self._over.is_set() or there[:1] != [self._own] or not any(given and given["enabled"] for given in said):
            return
        for replica in sorted({place.replica for place in self._places}):
            ranks = [rank for rank, place in enumerate(self._places) if place.replica == replica]
            ranks.sort(key=lambda rank: self._places[rank].rank)
            call = RollCall(self._config, VERSION, replica, ADVICE)
            try:
                call.take([_said(said[rank]) for rank in ranks], len(ranks))
            except AttachError as error:
                self._problem = self._problem or error


def _said(given: dict[str, Any] | None) -> dict[str, Any]:
    return given or {"missing": NOT_GUARDED if given is None else "has not come to the end of its attach"}


def _key(what: object) -> str:
    return f"canary/guarded/{what}"


def _ways(config: CanaryConfig, guarded: bool) -> dict[str, str]:
    """How this rank does the things done by ranks together; empty for a thing not done."""
    share, recomputes = config.recompute, guarded and may_recompute(config)
    return {
        ACTS: config.on_violation if config.on_violation != "report" else "",
        RECOMPUTES: f"{share.share} {share.verdicts} {config.control == 'write'}" if recomputes else "",
    }


def _way(given: dict[str, Any] | None, what: str) -> str | None:
    """How a rank does ``what``; None without a word."""
    way: str | None = ((given or {}).get("ways") or {}).get(what)
    return way
