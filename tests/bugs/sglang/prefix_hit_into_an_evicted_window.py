"""A prefix is matched although its window slots were evicted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The window's validator of matches takes every node."""
    from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent

    def create_match_validator(usual: Any, component: Any, match_device_only: bool = False) -> Any:
        right = usual(component, match_device_only)

        def validator(node: Any) -> bool:
            if not right(node):
                stage.strike()
            return True

        return validator

    with patched(SWAComponent, "create_match_validator", create_match_validator):
        yield


def traffic(stage: Any) -> None:
    """Bob begins like the first half of Alice, who has left that half's window behind."""
    asked = stage.tokens("alice", 60)
    stage.submit("alice", asked, 30)
    finish(stage)
    stage.submit("bob", [*asked, *(int(t) for t in stage.requests["alice"].output_ids[:8]), 7, 8, 9], 8)
    finish(stage)


BUG = Bug(
    title="A prefix hit into an evicted window",
    cause="The match counts full slots only, though the window slots of the matched prefix were given up.",
    row=WINDOW,
    issues=("sglang#8649", "sglang#30339"),
    setup="swa_python",
    broken=broken,
    traffic=traffic,
    default=Found(
        "null_slot",
        40,
        "bob uses the null slot 0 in the window pool swa for position 60: ... a window entry was evicted",
    ),
)
