"""Misuse of real SGLang allocators: found as what it is, with both sides."""

import pytest

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.takes_turns("another of these, lists and owners without an engine, and misuse in tests/bugs/sglang"),
]
COVERED = pytest.mark.beyond_ci("misuse of a window's allocator, which has two of MHA's")
SETUPS = ["swa", *(pytest.param(name, marks=COVERED) for name in ("pages", "mha", "hicache", "eagle"))]
CACHED = pytest.mark.beyond_ci("the same of a page in the prefix cache")


@CACHED
@pytest.mark.parametrize("name", SETUPS)
def test_a_free_page_that_is_freed_again(start, name):
    """The engine's own ``free`` on slots that nobody has: one finding for the page, with the step of the first free."""
    engine = start(name)
    engine.serve(prompts=engine.setup.traffic(0, 4), new_tokens=2)
    done = engine.misuse(what="double_free", prompts=engine.setup.traffic(1, 4)[2:])
    found = [v for v in done["violations"] if v["kind"] == "double_free"]
    assert [(v["region"], v["slot"]) for v in found] == [("full", done["slots"][0])]


@pytest.mark.parametrize("name", SETUPS)
def test_slots_freed_under_a_running_request(start, name):
    """The engine's own ``free`` on a page of a running request: its slots are found before the next forward reads
    them, with the reader, which wrote them too, and the step of the free."""
    engine = start(name)
    done = engine.misuse(what="free_in_use", prompts=engine.setup.traffic(1, 4)[2:])
    victim = done["requests"][-1]
    found = [v for v in done["violations"] if v["kind"] == "freed"]
    # The request may not have come to the page's last slots yet.
    slots = {v["slot"] for v in found}
    assert done["slots"][0] in slots
    assert slots <= set(done["slots"])
    assert {(v["request"], v["stored_request"]) for v in found} == {(victim, victim)}
    assert all(v["step_freed"] == v["step"] - 1 for v in found if v["step"] == min(v["step"] for v in found))


@CACHED
@pytest.mark.parametrize("name", SETUPS)
def test_a_held_page_is_handed_out(start, name):
    """The allocator's list names a page that a request still has: both requests are in the finding."""
    engine = start(name)
    done = engine.misuse(what="hand_out_held", prompts=engine.setup.traffic(1, 4)[2:])
    found = [v for v in done["violations"] if v["kind"] == "double_alloc"]
    assert [(v["region"], v["slot"]) for v in found] == [("full", done["slots"][0])]
    assert found[0]["stored_request"] == done["requests"][-1]
    assert found[0]["request"] in done["requests"]


@pytest.mark.parametrize("name", ["mha", pytest.param("pages", marks=COVERED)])
@pytest.mark.parametrize(
    ("what", "kind"), [("free", "double_free"), ("hand_out", "double_alloc"), ("evict", "evicted_in_use")]
)
def test_a_misused_prefix_cache(start, name, what, kind):
    """A cached page that nobody holds is freed beside the cache, or handed out before the cache has evicted it; or the
    cache evicts a node that a request holds: found as what it is, of the node's slots only, without another forward."""
    engine = start(name)
    done = engine.misuse_cached(what=what, prompts=engine.setup.traffic(1, 4)[2:])
    found = done["violations"]
    assert {(v["kind"], v["region"]) for v in found} == {(kind, "full")}
    assert {v["slot"] for v in found} <= set(done["slots"])
    assert done["slots"][0] in {v["slot"] for v in found}
    assert {v["stored_state"] for v in found} == {"written" if what == "evict" else "parked"}


def test_an_engine_that_fails_tells_first_what_was_found(start):
    """A page that is freed again, then an exception out of the scheduler's loop, as SGLang's own checks raise it: the
    finding is told, and the exception goes its way."""
    engine = start("mha")
    done = engine.misuse_and_fail(prompts=engine.setup.traffic(0, 4))
    found = [v for v in done["violations"] if v["kind"] == "double_free"]
    assert [(v["region"], v["slot"]) for v in found] == [("full", done["slots"][0])]
    assert done["error"] == "as an engine that finds its own books wrong"


def test_an_idle_engine_tells_what_its_allocator_did(start):
    """A page that is freed again after the last request has ended: found without another forward."""
    engine = start("mha")
    done = engine.misuse_idle(prompts=engine.setup.traffic(0, 4))
    assert [(v["kind"], v["slot"]) for v in done["violations"]] == [("double_free", done["slots"][0])]
