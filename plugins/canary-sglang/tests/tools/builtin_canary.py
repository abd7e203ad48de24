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
    torch.Tensor.pin_memory = lambda self, *args: self


def findings() -> int:
    """How many violations it has counted since the engine started, in all models."""
    logs = [manager._device_state.violation_log for manager in _managers()]
    return sum(int(log.violation_write_index.sum()) for log in logs)


def sweep() -> None:
    """Has it sweep the prefix cache now, where it sweeps at all: otherwise it does so after a forward."""
    for manager in _managers():
        manager._sweep_orchestrator._last_sweep_step = -1
        manager._sweep_orchestrator.maybe_run_sweep()


def _managers() -> list[Any]:
    from canary_sglang.hooks import HOOKS

    managers = [getattr(session.runner, "canary_manager", None) for session in HOOKS.sessions]
    return [manager for manager in managers if manager is not None]


def _unpinned(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call
