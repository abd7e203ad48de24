"""The map from full slots to window slots keeps entries whose window slot was given up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`clear_full_to_swa_mapping` does nothing, and what the prefix cache gives up is freed by that map."""
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

    def clear_full_to_swa_mapping(usual: Any, allocator: Any, full: Any) -> None:
        """Leaves the entries as they are."""

    def apply_component_action(usual: Any, component: Any, action: Any) -> None:
        stage.strike()
        for slots in action.indices:
            stage.allocator.free_swa_segment(slots, start_pos=0)
        usual(component, action)

    with (
        patched(SWATokenToKVPoolAllocator, "clear_full_to_swa_mapping", clear_full_to_swa_mapping),
        patched(FullComponent, "apply_component_action", apply_component_action),
    ):
        yield


def traffic(stage: Any) -> None:
    """Alice leaves the window behind her. Bob decodes while the prefix cache gives up what she left."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    stage.scheduler.flush_cache()
    stage.submit("alice", stage.tokens("alice", 24), 24)
    finish(stage)
    stage.submit("bob", stage.tokens("bob", 31), 40)
    until(stage, "bob", 4)
    stage.tree.evict(EvictParams(num_tokens=46))
    finish(stage)


BUG = Bug(
    title="The window's map is not cleared when slots leave the window",
    cause="A stale entry of the map from full to window slots frees a window slot that is somebody else's by now.",
    row=WINDOW,
    issues=("sglang#27586", "sglang#27789", "ATOM#1417"),
    setup="swa",
    broken=broken,
    traffic=traffic,
    default=Found("double_free", 0, "was freed by the engine although it was free already: freed twice"),
)
