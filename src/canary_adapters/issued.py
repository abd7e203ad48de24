"""`Issued`: work given to the device, to be waited for; `judged_answer`: an answer that leaves after such work."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from canary_core.runtime.streams import current


class Issued:
    """Everything issued on the current stream of ``device`` until now. Never captured. A CPU has done all of it."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(current(device))

    def wait(self) -> None:
        """Waits until the device is done with all of it. From any thread."""
        if self._event is not None:
            self._event.synchronize()


@cache
def judged_answer(base: type[Any]) -> Callable[[torch.device, Callable[[], None]], Any]:
    """A class for the answers of a worker without tokens. ``base``: the engine's class of outputs made later, by
    `get_output` in another thread: here after all work issued before on ``device``, and after a call of ``judge``. The
    answer is None then."""

    class JudgedAnswer(base):  # type: ignore[misc]
        def __init__(self, device: torch.device, judge: Callable[[], None]) -> None:
            self._issued, self._judge = Issued(device), judge

        def get_output(self) -> None:
            self._issued.wait()
            self._judge()

    return JudgedAnswer
