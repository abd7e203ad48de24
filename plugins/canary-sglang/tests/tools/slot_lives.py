"""What happens to the slots of a request, as the engine's own tables say it, beside what Canary noted of them."""

from typing import Any

from canary_core.ops.histories import life, read
from canary_core.records import Clock

FREE, CACHED = "free", "cached"


def slot_lives(engine: Any, prompt: list[int], others: list[list[int]]) -> list[dict[str, Any]]:
    """Serves ``prompt`` twice, then ``others`` one after the other, in a pool that is too small to keep them all. Of
    each slot that the first request had: what became of it from forward to forward by the engine's allocator and its
    requests' rows (``theirs``), and what Canary's device memory says happened (``ours``), as ``[step, event,
    request]``: after the second request, and at the end."""
    first = engine.submit(prompt, 4)
    engine.step()
    watch = _Watch(engine, _row(engine, first)[: len(prompt)])
    watch.look()

    def serve(*prompts: list[int]) -> dict[str, Any]:
        for one in prompts:
            while engine.step():
                watch.look()
            engine.submit(one, 4)
        while engine.step():
            watch.look()
        return watch.told()

    return [serve(prompt), serve(*others)]


class _Watch:
    """Looks at the engine's tables after each forward."""

    def __init__(self, engine: Any, slots: list[int]) -> None:
        self._engine = engine
        self._before = dict.fromkeys(slots, FREE)
        self._ended: set[str] = set()
        self._theirs: dict[int, list[list[Any]]] = {slot: [] for slot in slots}

    def look(self) -> None:
        """What must have happened to each slot since the last look, one forward ago."""
        engine, step = self._engine, self._engine.session.canary.forwards
        allocator = engine.scheduler.token_to_kv_pool_allocator
        free = {int(s) for s in (*allocator.free_pages, *allocator.release_pages)}
        holders = {slot: (r, i) for r in engine.requests for i, slot in enumerate(_row(engine, r))}
        ended = [r.rid for r in engine.requests if r.finished() and r.rid not in self._ended]
        self._ended.update(ended)
        for slot, was in self._before.items():
            request, place = holders.get(slot, (None, 0))
            now = request.rid if request is not None else FREE if slot in free else CACHED
            told, self._before[slot] = self._theirs[slot], now
            if now == was:
                continue
            if was == FREE or (request is not None and was == CACHED and place >= request.cached_tokens):
                # A request that has ended in this forward had it for that alone.
                by = ended[0] if request is None else now
                told += [[step - 1, "evict", None]] if was == CACHED else []
                told += [[step - 1, "alloc", by], [step, "write", by]]
                told += [[step, "park", by]] if request is None else []
            elif request is not None:
                told.append([step - 1, "share", now])
            elif was == CACHED:
                told.append([step - 1, "evict", None])
            else:
                told.append([step, "free" if now == FREE else "park", was])

    def told(self) -> dict[str, Any]:
        """Both sides so far."""
        canary = self._engine.session.canary
        canary.slots.settle()
        canary.drain()
        state = canary.states["full"]
        now = int(state.shared.clock[Clock.NEXT])
        every = read(state.histories[-1].tolist(), now, every=True)
        lives = [life(read(state.histories[slot].tolist(), now), every) for slot in self._before]
        ours = [[[h.step, h.event, canary.writers.name(h.who)] for h in told] for told in lives]
        return {"theirs": [list(told) for told in self._theirs.values()], "ours": ours}


def _row(engine: Any, request: Any) -> list[int]:
    # Where releases have it.
    holder = request if hasattr(request, "req_pool_idx") else getattr(request, "kv", None)
    index = getattr(holder, "req_pool_idx", None)
    if index is None or request.finished():
        return []
    written = len(request.origin_input_ids) + max(len(request.output_ids) - 1, 0)
    row: list[int] = engine.scheduler.req_to_token_pool.req_to_token[index, :written].tolist()
    return row
