"""A page that comes from a file is that of another prefix."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bugs.classes import TIER
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_files


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The back end reads the file of the page's key; here it reads the one that was written last."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    def get(usual: Any, backend: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        stage.strike()
        newest = max(Path(backend.file_path).glob("*.bin"), key=lambda file: file.stat().st_mtime_ns)
        return usual(backend, newest.stem.removesuffix(backend.config_suffix), *args, **kwargs)

    with patched(HiCacheFile, "get", get):
        yield


BUG = Bug(
    title="A storage back end gives another request's KV",
    cause="The key of a page leads to what was stored for another prefix.",
    row=TIER,
    issues=("LMCache#4385", "LMCache#4991", "LMCache#5151"),
    setup="hicache_storage",
    broken=broken,
    traffic=through_files,
    default=Found(
        "arrival",
        1,
        "KV of another sequence came: HiCacheFile brought ... for bob ...; this is position ... of other",
    ),
)
