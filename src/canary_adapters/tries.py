"""`Tries`: whether a request with wrong KV is computed again, or ends."""

from collections.abc import Container, MutableMapping
from typing import Generic, TypeVar

from canary_core.errors import error_text

MOST_TRIES = 2
"""How often one request is computed again, before an error ends the request: the fault stays."""

Key = TypeVar("Key")


def leaked(error: Exception) -> str:
    """The reason of a ``quarantine_failed`` event after an ``error`` in acting on verdicts."""
    return (
        f"{error_text(error)}; tokens of this step may have been given out, although KV that they were computed from "
        "was found to be wrong"
    )


class Tries(Generic[Key]):
    """Requests with wrong KV, before their scheduler takes the tokens of the step in which that was found.

    | ``CANARY_ON_VIOLATION`` | requests that have the block                         | the block                    |
    |-------------------------|------------------------------------------------------|------------------------------|
    | abort                   | end with an error                                    | stays                        |
    | quarantine              | are computed again, and keep their generated tokens  | leaves the prefix cache      |
    | protect                 | so, if these are right (`Verdict.stands`; never with | with all that was computed   |
    |                         | changed bytes), or are none; else they end           | from it                      |

    mode: that setting. counts: a mapping for the numbers of tries, by request or by its name.
    """

    def __init__(self, mode: str, counts: MutableMapping[Key, int]) -> None:
        self._mode = mode
        self._counts = counts
        self._steps: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._counts

    def began(self, key: Key) -> None:
        """The engine itself computes the request again, which counts as no try."""
        self._counts.setdefault(key, 0)

    def again(self, key: Key, stands: bool, step: int = 0) -> bool:
        """Whether the request is computed again once more; else it ends. ``stands``: whether its generated tokens, if
        there are any, are right. ``step``: the last one whose tokens it then loses, 0 for unknown."""
        tries = self._counts[key] = self._counts.get(key, 0) + 1
        goes_on = self._mode != "abort" and tries <= MOST_TRIES and (stands or self._mode == "quarantine")
        if goes_on and step:
            self._steps[key] = step
        return goes_on

    def taken_back(self, key: Key, step: int) -> bool:
        """Whether the request has lost the tokens of ``step`` already: a forward may leave more findings than one."""
        return 0 < step <= self._steps.get(key, 0)

    def keep(self, requests: Container[Key]) -> None:
        """Forgets all but these ``requests``."""
        for kept in (self._counts, self._steps):
            for key in [key for key in kept if key not in requests]:
                del kept[key]
