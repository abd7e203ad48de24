"""The client's side of a verification: asks the verifiers of all engines, and looks until each has answered."""

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canary_core.desk.control import client
from canary_core.desk.control.messages import MOST_VALUE, Request
from canary_core.errors import ControlError

FIRST_LOOK_S, LAST_LOOK_S = 0.05, 1.0
"""Time from one look to the next: longer each time."""


@dataclass(slots=True)
class Verified:
    """What one process has answered: ``answers`` as `Verification.to_dict`, with model, replica and rank beside.
    ``errors``: sentences about what is missing. asked: engines asked in it."""

    asked: int
    answers: list[client.Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def verify(paths: Sequence[Path], request: str | None, timeout_s: float) -> "dict[Path, Verified | ControlError]":
    """Has ``request``, or (None) all that run, verified by each process, at the same time. Waits at most about
    ``timeout_s`` seconds; then nothing more is computed for it. Raises `ControlError` where no process can verify
    anything."""
    if request is not None and not 0 < len(request) <= MOST_VALUE:
        raise ControlError(f"the name of a request has 1 to {MOST_VALUE} characters, got {len(request)}; see --request")
    given_up = threading.Event()
    answers = client.at_once(paths, lambda path: _one(path, request, timeout_s, given_up), given_up.set)
    able = {path: one for path, one in answers.items() if not isinstance(one, Verified) or one.asked}
    if not able:
        one = next(one for one in answers.values() if isinstance(one, Verified))
        processes = ", ".join(path.stem for path in paths)
        raise ControlError(f"nothing can be verified in process {processes}: {one.errors[0]}")
    return able


def only_where_it_runs(answers: Iterable[Verified]) -> None:
    """Of one request's ``answers`` leaves those of engines that have it, if any has: the others say no more than that
    it does not run there."""
    listed = list(answers)
    if any(one["tokens"] for verified in listed for one in verified.answers):
        for verified in listed:
            verified.answers = [one for one in verified.answers if one["tokens"]]


def _one(path: Path, request: str | None, timeout_s: float, given_up: threading.Event) -> Verified:
    deadline = time.monotonic() + timeout_s
    begun = client.ask(path, Request(command="verify", value=request))
    verified = Verified(int(begun["asked"]))
    if not verified.asked:
        verified.errors.append(str(begun["why"]))
        return verified
    ticket, wait = str(begun["ticket"]), FIRST_LOOK_S
    state: client.Answer = {"pending": verified.asked, "left": 0, "forwards": 0}
    told = 0
    try:
        while state["pending"] or state["left"]:
            left = deadline - time.monotonic()
            if (left <= 0 and not state["left"]) or given_up.is_set():
                verified.errors.append(_late(path, request, timeout_s, state))
                break
            if not state["left"]:
                time.sleep(min(wait, left))
                wait = min(2 * wait, LAST_LOOK_S)
            try:
                state = client.ask(path, Request(command="verified", value=ticket, after=told))
            except client.SilentError as silent:
                # Its host may be at work on this very request.
                if deadline < time.monotonic():
                    verified.errors.append(str(silent))
                    break
                continue
            told += len(state["answers"])
            _sort(state["answers"], verified, path)
    except ControlError as error:
        verified.errors.append(f"{error} Nothing more was verified in process {path.stem}")
    finally:
        with contextlib.suppress(ControlError):
            client.ask(path, Request(command="forget", value=ticket))
    return verified


def _sort(told: Iterable[dict[str, Any]], verified: Verified, path: Path) -> None:
    for one in told:
        if "error" in one:
            verified.errors.append(f"process {path.stem}, replica {one['replica']}, rank {one['rank']}: {one['error']}")
        else:
            verified.answers.append(one)


def _late(path: Path, request: str | None, timeout_s: float, state: client.Answer) -> str:
    what = "all that run" if request is None else f"request {request!r}"
    late = f"process {path.stem} has not verified {what} within {timeout_s:g} s"
    if not state["forwards"]:
        return f"{late}: it ran no forward meanwhile, and work is done between two; ask while the request runs"
    return (
        f"{late}, in which it ran {state['forwards']} forwards: it waits for room beside the requests of users; ask "
        "again with a longer --timeout, or in a quieter hour"
    )
