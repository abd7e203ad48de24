"""HiCache's storage back ends, here ``file``: what comes back from files is compared with what was given to them.

Real on a CPU: the prefix cache, the controller and its threads, the host pools, the back end and its files. Stood in
for: the copies between host and device, and pinned memory, see `cpu/host_copies.py`. On a GPU nothing is:
``gpu/hicache.py --storage``.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.setups import TRITON
from tools.recompute_verdicts import clean, told
from tools.recomputes import prompt

PAGE, LAYERS, HALVES = 4, 3, "kv"
STORAGE = {
    # The host pool is smaller than what is served, too, so that pages come from files.
    "hicache_ratio": 1.5,
    "page_size": PAGE,
    # The files of all engines here have the same names.
    "served_model_name": "tiny",
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 4}',
}
PRIVATE = {"CANARY_LEDGER_PRIVATE": "HiCacheFile", "CANARY_READ_CHECK": "0"}

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("hicache_storage"),
    pytest.mark.takes_turns("the ledger in the core's tests, and what canary-vllm loads", unit="storage"),
]


def prompts(seed: int, count: int = 8) -> list[list[int]]:
    """Distinct prompts; those of two seeds are together more than the pools on the device and on the host hold."""
    return [[3 + (seed * 97 + 31 * i + j * j) % 240 for j in range(40)] for i in range(count)]


class Stored:
    """An engine, and the files in which it stores."""

    def __init__(self, launch: Callable[..., Any], folder: Path, options: Any = (), **settings: str) -> None:
        self.folder = folder
        fields = {"options": {**STORAGE, **dict(options)}, "environment": {**TRITON, "CANARY_BACKEND": "torch"}}
        where = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
        self.engine = launch(fields, like="hicache", **{**PRIVATE, **where, **settings})

    def turns(self, *seeds: int) -> list[dict[str, Any]]:
        """Serves the prompts of each seed."""
        return [self.engine.serve(prompts=prompts(seed), new_tokens=4) for seed in seeds]

    def files(self) -> list[Path]:
        """The stored pages."""
        return sorted(self.folder.glob("*.bin"))

    def told(self, name: str) -> list[dict[str, Any]]:
        """Events of this name since the start."""
        return [event for event in self.engine.events() if event["name"] == name]


@pytest.fixture(scope="module")
def stored(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """One whose files are its own, and that has served the prompts of seeds 1 and 2."""
    store = Stored(launch, tmp_path_factory.mktemp("store"))
    store.turns(1, 2)
    return store


@pytest.mark.newest_release
def test_what_comes_back_from_files_is_what_was_stored(stored):
    """Each page that a file brings is compared with what this engine computed for its prefix, and is the same; nothing
    is unknown."""
    before = stored.engine.arrivals()
    first, _, again = stored.turns(1, 2, 1)
    found, after = stored.engine.findings(), stored.engine.arrivals()
    assert again["outputs"] == first["outputs"]
    assert after["loaded_slots"] > before["loaded_slots"]
    assert after["expected_slots"] - before["expected_slots"] > 100
    assert after["unknown_slots"] == 0
    assert found["violations"] == []
    assert found["stats"]["unknown_slots"] == 0
    assert found["stats"]["ledger_matched"] == found["stats"]["ledger_compared"] > 50
    assert not {"ledger_unknown", "ledger_unjudged", "ledger_rewritten"} & found["stats"].keys()


@pytest.mark.newest_release
@pytest.mark.parametrize("source", ["k.0", "v.2"])
def test_a_byte_that_changes_in_a_file_is_told(stored, source):
    """One bit of one page on the disk: told when it is loaded, with layer, half, position and request."""
    half, layer = source.split(".")
    page = stored.files()[len(source)]
    content = page.read_bytes()
    begin = (HALVES.index(half) * LAYERS + int(layer)) * len(content) // (len(HALVES) * LAYERS)
    flipped = bytearray(content)
    flipped[begin + 5] ^= 4
    page.write_bytes(flipped)
    stored.turns(1, 2, 1, 2)
    found = stored.engine.findings()["violations"]
    page.write_bytes(content)
    stored.engine.flush()
    assert {(v["kind"], v["layer"], v["half"], v["origin"]) for v in found} == {
        ("arrival", int(layer), half, "HiCacheFile")
    }
    assert all(v["sources"] == [source] and v["request"].startswith("r") for v in found)
    assert len({(v["position"], v["stored_value"], v["found_value"]) for v in found}) == 1


def test_a_file_with_another_pages_content_is_told(stored):
    """A page that holds what another one should: all of it differs."""
    page, other = stored.files()[3:5]
    content = page.read_bytes()
    shutil.copyfile(other, page)
    stored.turns(1, 2, 1, 2)
    found = stored.engine.findings()["violations"]
    page.write_bytes(content)
    stored.engine.flush()
    assert {(v["kind"], len(v["sources"])) for v in found} == {("arrival", len(HALVES) * LAYERS)}


def test_a_torn_file_is_told(stored):
    """A page of which only the first half reached the disk, as after a crash, with zeros behind: V is missing."""
    page = stored.files()[6]
    content = page.read_bytes()
    page.write_bytes(content[: len(content) // 2] + bytes(len(content) // 2))
    stored.turns(1, 2, 1, 2)
    found = stored.engine.findings()["violations"]
    page.write_bytes(content)
    stored.engine.flush()
    assert {(v["kind"], *v["sources"]) for v in found} == {("arrival", "v.0", "v.1", "v.2")}


def test_after_that_what_is_right_is_silent(stored):
    """With the right files back, and after a flush, all of it matches again."""
    before = stored.engine.findings()["stats"]
    stored.turns(1, 2, 1)
    found = stored.engine.findings()
    assert found["violations"] == []
    assert found["stats"]["ledger_matched"] > before["ledger_matched"]
    assert found["stats"]["ledger_differing"] == before["ledger_differing"]


@pytest.mark.beyond_ci("the same with files that are right or wrong, not shared")
def test_where_others_may_store_nothing_is_told(launch, tmp_path):
    """As long as nobody says that the files are this engine's own, a difference proves nothing and is counted."""
    store = Stored(launch, tmp_path, CANARY_LEDGER_PRIVATE="")
    store.turns(1, 2)
    for page in store.files():
        content = bytearray(page.read_bytes())
        content[0] ^= 1
        page.write_bytes(content)
    store.turns(1, 2, 1)
    found = store.engine.findings()
    assert found["violations"] == []
    assert found["stats"]["ledger_unknown"] > 0
    assert "ledger_differing" not in found["stats"]


@pytest.mark.beyond_ci("the same with files of one engine only")
def test_files_of_an_earlier_run_make_them_shared(launch, tmp_path):
    """Pages that this engine never stored come back although they were said to be its own: told as an event, and from
    then on a difference is counted only."""
    Stored(launch, tmp_path).turns(1)
    later = Stored(launch, tmp_path)
    later.turns(1, 2, 1)
    found = later.engine.findings()
    assert found["violations"] == []
    assert found["stats"]["ledger_unknown"] > 0
    assert [event["origin"] for event in later.told("ledger_shared")] == ["HiCacheFile"]


@pytest.mark.beyond_ci("the same with files of the right size")
def test_a_short_file_is_refused_by_sglang(launch, tmp_path):
    """SGLang's back end refuses a file that is too short; the prompt is computed, and nothing is told of what never
    came. (Its reading thread ends with that error, so that nothing comes from files any more.)"""
    store = Stored(launch, tmp_path, {"hicache_storage_prefetch_policy": "timeout"})
    first, _ = store.turns(1, 2)
    for page in store.files():
        os.truncate(page, 100)
    again, _ = store.turns(1, 2)
    assert store.engine.findings()["violations"] == []
    assert again["outputs"] == first["outputs"]
    assert "Short read" in store.engine.log


AGAIN = dict(
    CANARY_RECOMPUTE="100%", CANARY_TRANSFER_RECORDS="false", CANARY_LEDGER="0", CANARY_BYTES="off",
    CANARY_SCRUB_BUDGET="0",
)  # fmt: skip
"""Requests are computed again, and nothing else looks at what comes back."""


def test_requests_beside_tiers_are_computed_again(launch, tmp_path):
    """Host memory and files bring prefixes to users' requests alone: what is stored, and what is answered, is the same
    without Canary. Then files with pages of other prompts, which only the second computation finds."""
    room = {"max_total_tokens": 960, "max_running_requests": 6, "dtype": "float32"}
    store = Stored(launch, tmp_path / "watched", room, **AGAIN)
    plain = Stored(launch, tmp_path / "plain", room, CANARY_MODE="off")
    asked = dict(prompts=[prompt for seed in (1, 2, 3, 4, 5) * 2 for prompt in prompts(seed)], new_tokens=40)
    done = store.engine.recompute_traffic(**asked)
    assert done["outputs"] == plain.engine.serve(**asked)["outputs"]
    assert [page.name for page in store.files()] == [page.name for page in plain.files()]
    assert store.engine.arrivals()["loaded_slots"] > 500
    judged, same = clean(done)
    assert judged >= 80
    assert same >= 60
    left = store.engine.parked_verify()
    assert left["violations"] == []
    assert {answer["verdict"] for answer in left["answers"]} == {"same", "gone"}
    pages = store.files()
    contents = [page.read_bytes() for page in pages]
    for page, content in zip(pages, contents[1:] + contents[:1], strict=True):
        page.write_bytes(content)
    found = told(store.engine.recompute_traffic(**asked))
    assert found
    assert {(layer, why) for layer, _, _, why in found} == {(0, "brought")}


@pytest.mark.beyond_ci("canary-vllm's test of a store that turns out to be shared")
def test_what_others_have_stored_and_rounded_otherwise_is_not_told(launch, tmp_path):
    """Files said to be this engine's own hold another engine's KV, which keeps fewer bits: once the ledger knows that
    (`ledger_shared`), requests with a hit are left without a verdict, and others are the same."""
    room = {"max_total_tokens": 960, "max_running_requests": 6, "dtype": "float32"}
    other = Stored(launch, tmp_path, room, CANARY_MODE="off")
    other.turns(1, 2, 3, 4, 5)
    for page in other.files():
        numbers = torch.frombuffer(bytearray(page.read_bytes()), dtype=torch.float32)
        page.write_bytes(numbers.bfloat16().float().numpy().tobytes())
    store = Stored(launch, tmp_path, room, CANARY_RECOMPUTE="100%", CANARY_SCRUB_BUDGET="0")
    fresh = [prompt(f"fresh {n}", 70 + n) for n in range(40)]
    asked = [one for seed in (1, 2, 3, 4, 5) * 2 for one in prompts(seed)]
    done = store.engine.recompute_traffic(prompts=[*fresh[:24], *asked, *fresh[24:]], new_tokens=40)
    reasons = [answer["reason"] for answer in done["answers"] if answer["verdict"] == "unjudged"]
    assert [event["origin"] for event in store.told("ledger_shared")] == ["HiCacheFile"]
    assert store.engine.arrivals()["loaded_slots"] > 500
    assert done["violations"] == []
    assert sum("others store, too" in reason for reason in reasons) > 10
    assert [answer["verdict"] for answer in done["answers"]].count("same") > 10
