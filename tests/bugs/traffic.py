"""What the engines are asked to serve. All of it works on any stage that has requests."""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bugs.museum import Stage


def finish(stage: Stage, most: int = 400) -> None:
    """Serves until there is nothing left to do."""
    for _ in range(most):
        if not stage.step():
            return
    raise RuntimeError(f"the traffic does not end in {most} forwards")


def until(stage: Stage, name: str, tokens: int) -> None:
    """Serves until the request has generated so many."""
    for _ in range(200):
        if stage.answered(name) >= tokens:
            return
        stage.step()
    raise RuntimeError(f"{name} gets no further than {stage.answered(name)} tokens")


def together(stage: Stage) -> None:
    """Alice and Bob decode side by side; Bob has more to say."""
    stage.submit("alice", stage.tokens("alice", 24), 10)
    stage.submit("bob", stage.tokens("bob", 31), 16)
    finish(stage)


def joining(stage: Stage) -> None:
    """Alice decodes; Bob and then Carol come in the middle of it; Alice ends first."""
    stage.submit("alice", stage.tokens("alice", 24), 8)
    until(stage, "alice", 3)
    stage.submit("bob", stage.tokens("bob", 31), 12)
    until(stage, "bob", 2)
    stage.submit("carol", stage.tokens("carol", 17), 12)
    finish(stage)


def same_beginning(stage: Stage) -> None:
    """Alice is served to the end. Bob, who comes after her, begins like her."""
    asked = stage.tokens("alice", 40)
    stage.submit("alice", asked, 6)
    finish(stage)
    stage.submit("bob", [*asked, *stage.tokens("bob", 9)], 10)
    finish(stage)


def same_beginning_at_once(stage: Stage) -> None:
    """Alice is prefilled and decodes; Bob, who begins like her, comes meanwhile; then Carol does."""
    asked = stage.tokens("alice", 40)
    stage.submit("alice", asked, 12)
    until(stage, "alice", 3)
    stage.submit("bob", [*asked, *stage.tokens("bob", 9)], 10)
    until(stage, "bob", 3)
    stage.submit("carol", [*asked, *stage.tokens("carol", 5)], 8)
    finish(stage)


def asked_again(stage: Stage) -> None:
    """Alice asks, and Bob asks what she did and what she was told, and more."""
    asked = stage.tokens("alice", 30)
    stage.submit("alice", asked, 8)
    finish(stage)
    stage.submit("bob", asked, 8)
    finish(stage)
    stage.submit("carol", asked, 12)
    finish(stage)


def through_host_memory(stage: Stage) -> None:
    """Alice is served; others fill the pool, so that her KV is in host memory only; Bob begins like her."""
    _crowded_out(stage, 5, finish)


def through_connector(stage: Stage) -> None:
    """On vLLM with a connector, which stores what is computed: Alice is served; others use her blocks; Bob begins like
    her."""
    asked = stage.tokens("alice", 70)
    stage.submit("alice", asked, 4)
    finish(stage)
    for number in range(8):
        stage.submit(f"other{number}", stage.tokens(f"other{number}", 90), 2)
        finish(stage)
    stage.submit("bob", [*asked, *stage.tokens("bob", 9)], 6)
    finish(stage)


def through_files(stage: Any) -> None:
    """On SGLang with HiCache: Alice is served; others fill the device and host memory, so that her KV is in files only;
    Bob begins like her."""
    if not stage.scheduler.enable_hicache_storage:
        _attach_files(stage.scheduler)
    _crowded_out(stage, 8, _finish_with_storage)


def _crowded_out(stage: Any, others: int, finish: Callable[[Any], None]) -> None:
    """Alice, then so many ``others``, then Bob, who begins like her; ``finish`` serves each to the end."""
    asked = stage.tokens("alice", 40)
    stage.submit("alice", asked, 4)
    finish(stage)
    for number in range(others):
        stage.submit(f"other{number}", stage.tokens(f"other{number}", 50), 2)
        finish(stage)
    stage.submit("bob", [*asked, *stage.tokens("bob", 3)], 6)
    finish(stage)


def _attach_files(scheduler: Any) -> None:
    """While the engine runs, since its threads don't survive the fork in which a bug runs."""
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput

    folder = tempfile.mkdtemp(prefix="canary-museum-")
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = folder
    done = scheduler.attach_hicache_storage_wrapped(
        AttachHiCacheStorageReqInput(
            hicache_storage_backend="file",
            hicache_storage_backend_extra_config_json='{"prefetch_threshold": 4}',
            hicache_storage_prefetch_policy="wait_complete",
        )
    )
    if not done.success:
        raise RuntimeError(done.message)


def _finish_with_storage(stage: Any) -> None:
    """Serves until there is nothing left to do for the engine and for the threads that read and write files."""
    for _ in range(2000):
        if stage.step():
            continue
        if all(request.finished() for request in stage.requests.values()) and not stage.tree.ongoing_backup:
            return
        time.sleep(0.01)
    raise RuntimeError("the storage back end does not answer")
