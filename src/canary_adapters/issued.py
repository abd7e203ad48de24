"""`Issued`: work that the device was given, to be waited for; `judged_answer`: an answer that leaves after that."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from canary_core.runtime.streams import current


class Issued:
    """All that was issued on the current stream of ``device`` until now. Never captured. A CPU has done it."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(current(device))

    def wait(self) -> None:
        """Until the device has done it. From any thread."""
        if self._event is not None:
            self._event.synchronize()


@cache
def judged_answer(base: type[Any]) -> Callable[[torch.device, Callable[[], None]], Any]:
    """A class for the answers of a worker without tokens. ``base``: the engine's class of outputs that another thread
    waits for, by `get_output`: here until ``device`` has done what was issued before, and ``judge`` has been called.
    The answer is None then."""

    class JudgedAnswer(base):  # type: ignore[misc]
        def __init__(self, device: torch.device, judge: Callable[[], None]) -> None:
            self._issued, self._judge = Issued(device), judge

        def get_output(self) -> None:
            self._issued.wait()
            self._judge()

    return JudgedAnswer
