"""`HeldMessages`: messages to SGLang's scheduler, handled without an internal request in the way."""

from collections.abc import Callable
from typing import Any

from canary_core import Patches

SERVED = frozenset({"TokenizedGenerateReqInput", "BatchTokenizedGenerateReqInput"})
"""Messages of requests to serve, which need no idle scheduler."""


class HeldMessages:
    """Calls ``leave`` before ``scheduler`` handles messages of clients: the present internal request ends. Returned is
    whether the scheduler is done with the request. If not, all messages are handled one turn of the scheduler's loop
    later, in order: to flush the cache, to change weights or to sleep, an engine must be idle, and can fail otherwise.
    Requests to serve never wait, unless behind such a message.
    """

    def __init__(self, scheduler: Any, leave: Callable[[], bool]) -> None:
        self._leave = leave
        self.held: list[Any] = []
        """Not handled yet, in the order of their arrival."""
        self._handle: Callable[..., Any] | None = None
        self._patches = Patches()
        self._patches.wrap(scheduler, "process_input_requests", self._processes)

    def close(self) -> None:
        """Nothing is held any more."""
        self._patches.undo()
        held, self.held = self.held, []
        if held and self._handle is not None:
            self._handle(held)

    def _processes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        self._handle = original

        def process(messages: Any) -> Any:
            if not messages and not self.held:
                return original(messages)
            done = self._leave()
            messages, self.held = [*self.held, *messages], []
            if not done and not all(type(one).__name__ in SERVED for one in messages):
                self.held, messages = messages, []
            return original(messages)

        return process
