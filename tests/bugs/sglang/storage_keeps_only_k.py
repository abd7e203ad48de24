"""What is stored in files has K and no V."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PARTIAL
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_files


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """A page has K of all layers, then V of all layers; here the second half is left as zeros."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    def put(usual: Any, backend: Any, key: str, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        stage.strike()
        page = value.clone()
        page[len(page) // 2 :] = 0
        return usual(backend, key, page, *args, **kwargs)

    with patched(HiCacheFile, "set", put):
        yield


BUG = Bug(
    title="A storage back end keeps only K (with `CANARY_LEDGER_PRIVATE`)",
    cause="Half of each page is left out when it is written to a file.",
    row=PARTIAL,
    issues=("sglang#38031", "vllm#50702"),
    setup="hicache_private",
    broken=broken,
    traffic=through_files,
    default=Found("arrival", 25, "HiCacheFile brought ... for bob ... every layer, V"),
)
