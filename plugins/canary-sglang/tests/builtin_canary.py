"""SGLang's own ``--kv-canary`` beside ours in one engine on a CPU, to compare them; from SGLang 0.5.21 on."""

import contextlib
import functools
from typing import Any

import torch


class Stream:
    """What `torch.cpu` has no such thing of: work on a CPU is in order."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> "Event":
        return Event()

    def query(self) -> bool:
        return True


class Event:
    """Likewise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def let_it_run_on_a_cpu() -> None:
    """Gives torch what the built-in canary asks of it: streams of the CPU; memory is not pinned."""
    torch.cpu.Stream, torch.cpu.Event = Stream, Event
    torch.cpu.stream = lambda stream: contextlib.nullcontext()
    torch.cpu.current_stream = lambda device=None: Stream()
    for name in ("empty", "zeros", "tensor"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def findings(runner: Any) -> int:
    """How many violations it has counted since the engine started."""
    state = runner.canary_manager._device_state
    return int(state.violation_log.violation_write_index.sum())


def _unpinned(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call
