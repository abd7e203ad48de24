"""HiCache: records go to host memory with the bytes and come back with them.

Real on a CPU: the prefix cache, the controller, the host pools, the scheduler. Stood in for: the copies between host
and device, and streams, of which a CPU has none; `gpu/test_hicache.py` runs the same on a GPU.
"""

import pytest
from engines.setups import HICACHE_COVERED_BY

pytestmark = [pytest.mark.timeout(900), pytest.mark.beyond_ci(HICACHE_COVERED_BY)]


def prompts(seed: int, count: int = 8) -> list[list[int]]:
    """Distinct prompts, together more than the device's pool holds."""
    return [[3 + (seed * 97 + 31 * i + j * j) % 240 for j in range(40)] for i in range(count)]


def test_what_is_loaded_back_has_its_records(hicache):
    """Prompts that were evicted to host memory are loaded and judged as if they had never left: nothing is found, and
    nothing is unknown."""
    first = hicache.serve(prompts=prompts(1), new_tokens=4)
    hicache.serve(prompts=prompts(2), new_tokens=4)
    before = hicache.arrivals()
    again = hicache.serve(prompts=prompts(1), new_tokens=4)
    found, arrivals = hicache.findings(), hicache.arrivals()
    assert found["violations"] == []
    assert found["stats"]["unknown_slots"] == 0
    assert arrivals["loaded_slots"] > before["loaded_slots"]
    assert arrivals["unknown_slots"] == 0
    assert sum(again["cached"]) > sum(first["cached"])
    assert again["outputs"] == first["outputs"]


@pytest.mark.parametrize("source", ["k.0", "v.1"])
def test_a_flip_in_host_memory_is_found_at_load(hicache, source):
    """One bit in a host buffer: when it is loaded, the finding names slot, layer, half and who wrote it."""
    hicache.serve(prompts=prompts(3), new_tokens=2)
    hicache.serve(prompts=prompts(4), new_tokens=2)
    assert hicache.findings()["violations"] == []
    hicache.flip_in_host_memory(source=source, seed=len(source))
    for seed in (3, 4, 1, 2) * 2:
        hicache.serve(prompts=prompts(seed), new_tokens=2)
    found = hicache.findings()["violations"]
    half, layer = source.split(".")
    assert {(v["kind"], v["layer"], v["half"]) for v in found} == {("bytes", int(layer), half)}
    assert found[0]["phase"] == "event"
    assert found[0]["stored_request"].startswith("r")
    assert found[0]["arrived"] is True
    assert found[0]["explanation"].startswith(f"the bytes that were copied or loaded to slot {found[0]['slot']} (page")
    hicache.flush()


def test_host_memory_is_told(hicache):
    """What the records take in host memory is an event."""
    told = [event for event in hicache.events() if event["name"] == "records_travel"]
    assert [(event["with"], event["region"]) for event in told] == [("hicache", "full")]
    assert told[0]["host_memory_bytes"] >= told[0]["host_slots"] * 8 * 5


def test_without_records_nothing_is_judged_wrongly(start):
    """With CANARY_TRANSFER_RECORDS off what is loaded is not judged, and counted as such."""
    engine = start("hicache", CANARY_TRANSFER_RECORDS="false")
    for seed in (1, 2, 1):
        engine.serve(prompts=prompts(seed), new_tokens=4)
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["unknown_slots"] > 0
    assert engine.arrivals()["parked_slots"] == 0


def test_with_quarantine_what_changed_in_host_memory_is_given_up(start):
    """A bit flips in host memory; once it was loaded and found, neither the device nor host memory has it any more: the
    same prompts are computed again, and nothing else is found."""
    engine = start("hicache", CANARY_ON_VIOLATION="quarantine", CANARY_READ_CHECK="0")
    for seed in (3, 4):
        engine.serve(prompts=prompts(seed), new_tokens=2)
    engine.flip_in_host_memory(source="k.0", seed=3)
    for seed in (3, 4) * 3:
        engine.serve(prompts=prompts(seed), new_tokens=2)
    names = [event["name"] for event in engine.events()]
    assert "quarantined" in names
    assert "quarantine_failed" not in names
    found = engine.findings()["violations"]
    assert {v["kind"] for v in found} == {"bytes"}
    for seed in (3, 4) * 2:
        engine.serve(prompts=prompts(seed), new_tokens=2)
    assert engine.findings()["violations"] == []
