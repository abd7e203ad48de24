"""Prefixes that ended requests left in SGLang's radix cache, computed again: wrong ones are told, clean ones and those
whose slots are used again never are, and the cache stays what it was."""

import json

import pytest
from engines.setups import since
from tools.recomputes import ASKED, OPTIONS, QUIET, prompt

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("recompute")]

PROVES = {**QUIET, "CANARY_RECOMPUTE": "100%"}
THREE = {"a": 100, "b": 100, "c": 100}
PROVING = pytest.mark.takes_turns("clean traffic of an engine that proves, and canary-vllm's tests", unit="proving")


@pytest.fixture(scope="module")
def asked(launch, tmp_path_factory):
    """An engine whose clients may ask, and whose noise is known; it proves nothing by itself. The Rust core."""
    folder = tmp_path_factory.mktemp("c")
    folder.chmod(0o700)
    control = dict(CANARY_CONTROL="write", CANARY_CONTROL_DIR=str(folder), CANARY_RECOMPUTE="0")
    engine = launch({"options": OPTIONS}, **QUIET, **control, CANARY_LIFETIME="off")
    engine.parked_teach()
    return engine


@pytest.fixture(scope="module")
def proving(launch):
    """An engine that proves what it can. The cache's core in Python, which shows its times."""
    engine = launch({"options": {**OPTIONS, "tree_core": "python"}}, **PROVES)
    engine.parked_teach()
    return engine


@pytest.fixture(scope="module")
def plain(launch):
    """An engine without Canary."""
    return launch({"options": OPTIONS}, CANARY_MODE="off")


def verdicts(done):
    """Request, verdict and number of tokens of each answer."""
    return [(one["request"], one["verdict"], one["tokens"]) for one in done["answers"]]


def told(done):
    """Layer, position, request and rule of each finding."""
    assert {v["kind"] for v in done["violations"]} <= {"recompute"}, done["violations"]
    return [(v["layer"], v["position"], v["request"], v["rule"]) for v in done["violations"]]


def test_weights_that_changed_under_a_kept_cache_are_told_without_a_hit(asked):
    """Of each prefix of the old weights, however it came there; one of the new weights is well."""
    tokens = prompt("weights", 93)
    asked.parked_prompt(name="before", tokens=tokens)
    asked.parked_prompt(name="hit", tokens=[*tokens[:64], *prompt("else", 29)])
    assert verdicts(asked.parked_verify(names=["before"])) == [("before", "same", 100)]
    asked.parked_weight(factor=1.05)
    try:
        # A token that no other prompt begins with: a hit of one token would be of the old weights, too.
        asked.parked_prompt(name="after", tokens=[2, *prompt("after", 92)])
        done = asked.parked_verify(names=["before", "hit", "after"])
    finally:
        asked.parked_weight(factor=1 / 1.05)
    assert verdicts(done) == [("before", "differs", 100), ("hit", "differs", 100), ("after", "same", 100)]
    assert told(done) == [(1, 0, "before", "everywhere"), (1, 0, "hit", "brought")]
    assert "it has ended, and the prefix cache keeps 100 tokens of it" in done["violations"][0]["detail"]
    assert done["tables"][0].startswith("prefix of before: differs, 100 tokens")
    assert all(answer["parked"] for answer in done["answers"])


@pytest.mark.newest_release
def test_parked_kv_that_changed_is_told_where_it_did(asked):
    """All checks of bytes are off: only a second computation can tell. In a namespace of its own as well."""
    asked.parked_serve(lengths={"ill": 93, "well": 93})
    asked.parked_serve(lengths={"salted": 93}, namespace="tenant")
    asked.parked_scale(name="ill", layer=1, positions=[*range(32, 64)], factor=1.01)
    asked.parked_scale(name="salted", layer=2, positions=[*range(100)], factor=1.01)
    done = asked.parked_verify(names=["ill", "well", "salted"])
    assert verdicts(done) == [("ill", "differs", 100), ("well", "same", 100), ("salted", "differs", 100)]
    assert [one[:3] for one in told(done)] == [(1, 32, "ill"), (2, 0, "salted")]


def test_what_was_evicted_is_gone_and_what_is_left_is_compared(asked):
    """SGLang evicts what was used longest ago, the answer before its prompt. No wrong word of what is written there
    since, and a reason for what never was remembered."""
    asked.parked_evict(tokens=1 << 20)
    asked.parked_serve(lengths={"old": 60, "cut": 60}, new_tokens=40)
    asked.parked_evict(tokens=99 + 39)
    left = asked.parked_left()
    assert (left["old"], left["cut"]) == (0, 60)
    asked.parked_weight(factor=1.05)
    try:
        asked.parked_serve(lengths={"over": 200})
        done = asked.parked_verify(names=["old", "nobody"])
    finally:
        asked.parked_weight(factor=1 / 1.05)
    assert verdicts(done) == [("old", "gone", 0), ("nobody", "unjudged", 0)]
    assert "0 of the 99 tokens that it left in the prefix cache are still there" in done["answers"][0]["reason"]
    assert "nothing is remembered that it left in the prefix cache" in done["answers"][1]["reason"]
    assert told(done) == []
    done = asked.parked_verify(names=["cut"])
    assert verdicts(done) == [("cut", "same", 60)]
    assert done["stats"]["recompute_gone"] >= 1


def test_a_prefix_that_goes_while_it_is_computed_again_is_gone(asked):
    """Between two chunks."""
    asked.parked_serve(lengths={"goes": 200})
    done = asked.parked_gives_way(what="evict", name="goes")
    assert (done["answer"]["verdict"], done["answer"]["tokens"], done["leaked"]) == ("gone", 0, 0)
    assert told(done) == []


def test_requests_of_users_go_first(asked):
    """What is computed again ends at once where somebody comes, and who asked is answered later."""
    asked.parked_serve(lengths={"long": 200})
    done = asked.parked_gives_way(what="user", name="long")
    assert (done["first"], done["in_the_middle"], done["leaked"]) == (1, False, 0)
    assert (done["answer"]["verdict"], done["answer"]["tokens"]) == ("same", 207)


def test_what_is_remembered_has_a_bound_and_says_so(asked):
    """Twice the tokens of the pool; the request that ended first goes first. What can't be computed again has its
    reason."""
    before = asked.parked_known()
    assert before["tokens"] <= before["most"] == 2 * 1536
    lengths = {f"r{turn}": 150 for turn in range(20)}
    asked.parked_serve(lengths=lengths, new_tokens=2)
    known = asked.parked_known()
    assert known["names"] == [*lengths][-len(known["names"]) :]
    assert len(known["names"]) == 2 * 1536 // (151 + 64)
    stats = asked.findings()["stats"]
    assert stats["parked_forgotten"] >= 20 - len(known["names"])
    assert stats["parked_remembered"] >= 20
    (full,) = [event for event in asked.events() if event["name"] == "parked_full"]
    assert full["most_tokens"] == 2 * 1536


def test_what_can_t_be_computed_again_is_left_out_and_says_why(asked):
    """Each reason once, each request counted, and the reason is the answer."""
    before = asked.findings()["stats"].get("parked_left_out", 0)
    done = asked.parked_left_out()
    if since("0.5.22"):
        # Embeddings do not enter the prefix cache there.
        assert (done["told"], done["answers"][1]["verdict"]) == ([], "unjudged")
        return
    ((request, reason),) = [(one["request"], one["reason"]) for one in done["told"]]
    assert (request, reason[:19]) == ("embedded", "media or embeddings")
    assert done["stats"]["parked_left_out"] - before == 1
    assert [answer["verdict"] for answer in done["answers"]] == ["unjudged", "unjudged"]
    assert done["answers"][0]["reason"].startswith("its adapter is not loaded just now")
    assert done["answers"][1]["reason"] == reason
    assert told(done) == []


@pytest.mark.takes_turns("canary-vllm's test of the command")
def test_the_command_asks_a_running_engine(asked):
    """As users type it: for requests that run, and for what ended ones left."""
    asked.flush()
    asked.parked_serve(lengths={"request 5": 61}, new_tokens=4)
    asked.parked_begin(names=["one", "two"])
    done = asked.parked_command(arguments=["--request", "two"])
    assert (done["code"], "two: same" in done["out"]) == (0, True), done
    done = asked.parked_command(arguments=["--all"])
    assert done["code"] == 0, done
    assert all(f"{name}: same" in done["out"] for name in ("one", "two"))
    asked.parked_finish(names=["one", "two"])
    done = asked.parked_command(arguments=["--all-parked", "--json"])
    (process,) = json.loads(done["out"])
    answers = {answer["request"]: answer for answer in process["answers"]}
    assert (done["code"], answers["request 5"]["verdict"], answers["request 5"]["parked"]) == (0, "same", True), done
    assert {answer["verdict"] for answer in answers.values()} <= {"same", "gone", "unjudged"}
    asked.parked_weight(factor=1.05)
    try:
        done = asked.parked_command(arguments=["--prefix-of", "request 5"])
    finally:
        asked.parked_weight(factor=1 / 1.05)
    assert done["code"] == 1, done
    assert "prefix of request 5: differs, 64 tokens" in done["out"]
    done = asked.parked_command(arguments=["--prefix-of", "nobody"])
    assert done["code"] == 2
    assert "there is no verdict on the prefix of request 'nobody'; the reason stands beside it" in done["err"]


def test_a_slot_that_is_written_while_the_cache_still_names_it_is_gone(asked):
    """An engine that hands out a slot of the cache: the records know that it holds something else. The last test with
    this engine, which is of no use afterwards."""
    asked.parked_evict(tokens=1 << 20)
    asked.findings()
    asked.parked_serve(lengths={"kept": 93})
    asked.parked_reused(name="kept", position=60, other=prompt("writes", 20))
    assert asked.parked_left()["kept"] == 100
    done = asked.parked_verify(names=["kept"])
    assert verdicts(done) == [("kept", "gone", 60)]
    assert told(done) == []


@PROVING
def test_an_idle_engine_proves_prefixes_in_turn_and_leaves_the_cache_as_it_was(proving):
    """For a share of the time, the least recently proven first; locks, hits, and the times by which SGLang evicts are
    as before."""
    proving.parked_idle(turns=1, seconds=0.0, share=0.0)
    proving.parked_serve(lengths=THREE, new_tokens=9)
    before, free = proving.parked_tree(), proving.parked_idle(turns=1, seconds=0.2)["free"]
    done = proving.parked_idle(turns=30, seconds=0.06, share=1.0)
    proven = [name for name, _, _ in done["answers"]]
    assert proven == [*"abcabcabc"][: len(proven)]
    assert len(proven) >= 6
    assert {(verdict, tokens) for _, verdict, tokens in done["answers"]} == {("same", 108)}
    assert (proving.parked_tree(), done["free"]) == (before, free)
    # Time spent counts: at a share of 1 % it rests 99 times as long.
    done = proving.parked_idle(turns=40, seconds=1.0, share=0.01)
    assert len(done["answers"]) <= 1
    done = proving.parked_idle(turns=1600, seconds=1.0)
    assert 2 <= len(done["answers"]) <= 9
    assert told(done) == []
    # The time of requests served meanwhile does not.
    assert proving.parked_rests(name="served", seconds=100.0) < 1


@PROVING
def test_an_idle_engine_gives_way_to_requests_and_to_messages_that_take_an_idle_one(proving):
    """A flush of the cache would fail beside a request, and an update of weights would end SGLang. In the middle of a
    proof it is as if there was none."""
    proving.parked_idle(turns=1, seconds=0.2, share=1.0)
    proving.parked_serve(lengths={"long": 300})
    done = proving.parked_gives_way(what="user")
    assert (done["first"], done["in_the_middle"], done["leaked"]) == (1, False, 0)
    done = proving.parked_gives_way(what="flush")
    assert (done["flushed"], done["leaked"]) == ([True], 0)
    assert set(proving.parked_left().values()) == {0}
    assert told(done) == []


@PROVING
def test_an_idle_engine_evicts_nothing_to_prove_something(proving):
    """Where all slots are of the cache, nothing is computed again without being asked for, and that is counted."""
    proving.parked_serve(lengths={f"full {turn}": 300 for turn in range(6)})
    before = proving.parked_tree()
    done = proving.parked_idle(turns=9, seconds=0.2)
    assert done["answers"] == []
    assert proving.parked_tree() == before
    assert done["stats"]["parked_no_room"] >= 1
    assert done["stats"]["parked_no_room"] <= 60
    assert verdicts(proving.parked_verify(names=["full 5"])) == [("full 5", "same", 307)]


@PROVING
def test_a_prefix_that_the_making_of_a_batch_evicts_is_gone(proving):
    """With a chunk of its own in that batch, the forward of which does not write to slots that were given back."""
    proving.parked_serve(lengths={"makes": 300})
    done = proving.parked_gives_way(what="making", name="makes")
    assert (done["answer"]["verdict"], done["answer"]["tokens"], done["leaked"]) == ("gone", 0, 0)
    assert told(done) == []


@pytest.mark.where(pytest.mark.takes_turns("the same with SGLang's other loop"), overlap=[False])
@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "overlap"])
def test_clean_traffic_is_well_and_answers_and_evictions_stay_the_same(plain, launch, overlap):
    """Requests that share prefixes, and are computed again whenever nobody is served."""
    shared = prompt("shared", 60)
    prompts = [[*shared[: 20 + 5 * (n % 8)], *prompt(n, (35, 90, 50, 150)[n % 4])] for n in range(24)]
    watched = launch({"options": {**OPTIONS, "disable_overlap_schedule": not overlap}}, **PROVES)
    watched.parked_teach()
    done = watched.parked_traffic(prompts=prompts)
    assert done["violations"] == []
    assert not done["in_flight"]
    assert len(done["answers"]) >= 20
    assert {verdict for verdict, _ in done["answers"]} <= {"same", "gone"}, done["answers"]
    assert done["outputs"] == plain.parked_traffic(prompts=prompts)["outputs"]
    if not overlap:
        assert watched.flush()
        assert plain.flush()
        for engine in (watched, plain):
            engine.parked_serve(lengths=THREE)
        assert len(watched.parked_idle(turns=20, seconds=0.2)["answers"]) >= 3
        assert watched.parked_drain(lengths=THREE) == plain.parked_drain(lengths=THREE)
    else:
        done = watched.parked_flush_overlapped(name="late", tokens=50)
        ((success, turns),) = done["flushes"]
        assert (success, done["outputs"], done["violations"]) == (True, [8, 4], [])
        assert 1 <= turns <= 2


@pytest.mark.takes_turns("verdicts with the setting, and canary-vllm's tests")
def test_without_a_setting_nothing_is_wrapped_or_remembered_and_that_is_said(launch):
    """Of one it is the reason without a verdict, of all an error."""
    done = launch({"options": OPTIONS}, **ASKED).parked_asked()
    one, every, _ = done["answers"]
    assert (one["request"], one["verdict"], one["parked"]) == ("ended", "unjudged", True)
    reason = "what requests leave in the prefix cache is not remembered here: that takes CANARY_CONTROL=write or CANARY"
    assert one["reason"].startswith(reason)
    assert every["error"].startswith(reason)
    assert done["wrapped"] == []


@PROVING
def test_a_running_engine_answers_for_prefixes_too(proving):
    """In the gaps that its users leave; a prefix is no running request."""
    proving.parked_evict(tokens=1 << 20)
    one, _, running = proving.parked_asked()["answers"]
    assert (one["request"], one["verdict"], one["parked"]) == ("ended", "same", True)
    assert (running["verdict"], running["parked"]) == ("unjudged", False)
