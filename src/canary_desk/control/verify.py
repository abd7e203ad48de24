"""The client's side of a verification: asks the verifiers of all engines, and looks until each has answered."""

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canary_core.errors import ControlError
from canary_desk.control import client
from canary_desk.control.messages import MOST_VALUE, Request

FIRST_LOOK_S, LAST_LOOK_S = 0.05, 1.0
"""Time from one look to the next: longer each time."""


@dataclass(slots=True)
class Verified:
    """The answers of one process, as `Verification.to_dict` with model, replica and rank beside. errors: a sentence
    about each missing answer. asked: number of engines asked there."""

    asked: int
    answers: list[client.Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def verify(
    paths: Sequence[Path], request: str | None, timeout_s: float, parked: bool = False
) -> "dict[Path, Verified | ControlError]":
    """Has ``request``, or (None) all running requests, verified by each process, at the same time, within about
    ``timeout_s`` seconds; ``parked``: prefixes of ended requests. Raises `ControlError` where no process can
    verify anything."""
    if request is not None and not 0 < len(request) <= MOST_VALUE:
        option = "--prefix-of" if parked else "--request"
        raise ControlError(f"the name of a request has 1 to {MOST_VALUE} characters, got {len(request)}; see {option}")
    given_up = threading.Event()
    deadline = time.monotonic() + timeout_s
    asked = Request(command="verify", value=request, parked=parked)
    begun = client.ask_all(paths, asked)
    again = client.at_once(_ranks(begun), lambda path: client.ask(path, asked))

    def one(path: Path) -> Verified:
        mine = begun[path]
        if isinstance(mine, ControlError):
            raise mine
        twice = again.get(path)
        more = [str(twice["ticket"])] if isinstance(twice, dict) and twice["asked"] else []
        return _one(path, mine, more, _Wait(request, parked, timeout_s, deadline, given_up))

    answers = client.at_once(paths, one, given_up.set)
    able = {path: one for path, one in answers.items() if not isinstance(one, Verified) or one.asked}
    if not able:
        why = next(one.errors[0] for one in answers.values() if isinstance(one, Verified))
        processes = ", ".join(path.stem for path in paths)
        raise ControlError(f"nothing can be verified in process {processes}: {why}")
    return able


def only_where_it_runs(answers: Iterable[Verified]) -> None:
    """Leaves the answers of engines with the request, if there are any: all others say "not running"."""
    listed = list(answers)
    if any(one["tokens"] for verified in listed for one in verified.answers):
        for verified in listed:
            verified.answers = [one for one in verified.answers if one["tokens"]]


@dataclass(frozen=True, slots=True)
class _Wait:
    request: str | None
    parked: bool
    timeout_s: float
    deadline: float
    given_up: threading.Event


def _ranks(begun: "Mapping[Path, client.Answer | ControlError]") -> list[Path]:
    """Processes of one replica, to be asked a second time: only one rank reaches the scheduler, perhaps before all
    others were asked."""
    replicas = {
        path: list(answer.get("replicas", ())) for path, answer in begun.items() if not isinstance(answer, ControlError)
    }
    every = [replica for listed in replicas.values() for replica in listed]
    return [path for path, listed in replicas.items() if any(every.count(replica) > 1 for replica in listed)]


def _one(path: Path, begun: client.Answer, more: Sequence[str], waits: _Wait) -> Verified:
    verified = Verified(int(begun["asked"]))
    if not verified.asked:
        verified.errors.append(str(begun["why"]))
        return verified
    ticket, wait = str(begun["ticket"]), FIRST_LOOK_S
    state: client.Answer = {"pending": verified.asked, "left": 0, "forwards": 0}
    told = 0
    try:
        while state["pending"] or state["left"]:
            left = waits.deadline - time.monotonic()
            if (left <= 0 and not state["left"]) or waits.given_up.is_set():
                verified.errors.append(_late(path, waits, state))
                break
            if not state["left"]:
                time.sleep(min(wait, left))
                wait = min(2 * wait, LAST_LOOK_S)
            try:
                state = client.ask(path, Request(command="verified", value=ticket, after=told))
            except client.SilentError as silent:
                # Its host may be at work on this very request.
                if waits.deadline < time.monotonic():
                    verified.errors.append(str(silent))
                    break
                continue
            told += len(state["answers"])
            _sort(state["answers"], verified, path)
    except ControlError as error:
        verified.errors.append(f"{error} Nothing more was verified in process {path.stem}")
    finally:
        for one in (ticket, *more):
            with contextlib.suppress(ControlError):
                client.ask(path, Request(command="forget", value=one))
    return verified


def _sort(told: Iterable[dict[str, Any]], verified: Verified, path: Path) -> None:
    for one in told:
        if "error" in one:
            verified.errors.append(f"process {path.stem}, replica {one['replica']}, rank {one['rank']}: {one['error']}")
        else:
            verified.answers.append(one)


def _late(path: Path, waits: _Wait, state: client.Answer) -> str:
    what = "all that run" if waits.request is None else f"request {waits.request!r}"
    if waits.parked:
        what = "all parked prefixes" if waits.request is None else f"the prefix of {what}"
    late = f"process {path.stem} has not verified {what} within {waits.timeout_s:g} s"
    if waits.parked and not state["forwards"]:
        return f"{late}: it ran no forward meanwhile, and while it is idle it does not come to it; ask while it serves"
    if not state["forwards"]:
        return f"{late}: it ran no forward meanwhile, and work is done between two; ask while the request runs"
    return (
        f"{late}, in which it ran {state['forwards']} forwards: it waits for room beside the requests of users; ask "
        "again with a longer --timeout, or in a quieter hour"
    )
