"""Real speculative decoding on a CPU: what the target accepts, rejects and moves raises nothing."""

from types import SimpleNamespace

import pytest
import torch
from canary_sglang.allocator.lifetime import Owners
from canary_sglang.batches.draft import DraftBatches
from canary_sglang.batches.forward import Anchors
from canary_sglang.batches.tokens import expected_tokens
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import batches
from canary_sglang.compat.drafts import shared_with_next_token
from engines.setups import SPECULATION

from canary_core.adapters import Writers

pytestmark = pytest.mark.timeout(1800)


FAULTS = (
    "req_to_token", "real_kv_used", "real_kv_unused_cache", "real_kv_post_forward", "lost_write", "stray_write",
    "swap_pages", "next_token_swap",
)  # fmt: skip


@pytest.mark.beyond_ci(SPECULATION)
@pytest.mark.parametrize("name", ["eagle", "eagle_tree", "eagle_pressure", "eagle_pages", "standalone", "ngram"])
def test_clean_speculation_raises_nothing(start, name):
    """Prefix hits, accepted tokens, trees whose accepted path is moved, retraction: no finding, and no slot that is
    read is unknown, in the target's pool and in the draft's. Canary and the allocator agree on which slots are free,
    those that are handed out ahead of their use too, and after a flush."""
    engine = start(name)
    traffic, served = engine.setup, []
    for seed in (0, 0):
        served.append(engine.serve(prompts=traffic.traffic(seed), new_tokens=traffic.new_tokens))
        assert engine.ownership()["full"]["differences"] == []
    found = engine.findings()
    assert found["violations"] == []
    assert set(engine.regions()) == set(traffic.regions)
    for stats in (found["stats"], *found["drafts"].values()):
        assert stats["checked_slots"] > 0
        assert stats["recorded_slots"] > 0
        assert stats["unknown_slots"] == 0
    assert engine.flush()
    assert engine.ownership()["full"]["differences"] == []
    assert {"disabled", "unguarded_forward", "lifetime_off"}.isdisjoint(event["name"] for event in engine.events())
    assert sum(served[1]["cached"]) > 0
    assert (sum(turn["retracted"] for turn in served) > 0) == (name == "eagle_pressure")
    verifies = sum(turn["verifies"] for turn in served)
    decoded = sum(len(output) - 1 for turn in served for output in turn["outputs"])
    assert 0 < verifies < decoded


@pytest.mark.beyond_ci(SPECULATION)
def test_refused_draft_models_leave_the_target_clean(start):
    """Multi-layer EAGLE: the pool of each of its draft models is named as not guarded; the target's is guarded, without
    a finding, and its allocator followed."""
    engine = start("eagle_layers")
    traffic = engine.setup
    served = [engine.serve(prompts=traffic.traffic(0, 3), new_tokens=traffic.new_tokens) for _ in range(2)]
    found = engine.findings()
    assert found["violations"] == []
    assert found["stats"]["checked_slots"] > 0
    assert found["stats"]["unknown_slots"] == 0
    assert set(engine.regions()) == {"full"}
    assert engine.ownership()["full"]["differences"] == []
    left_out = [item for event in engine.events() if event["name"] == "coverage" for item in event["uncovered"]]
    assert [item["name"] for item in left_out] == ["draft/pool", "draft1/pool", "draft2/pool"]
    assert all("multi-layer" in item["reason"] for item in left_out)
    assert sum(turn["verifies"] for turn in served) > 0


@pytest.mark.beyond_ci(SPECULATION)
@pytest.mark.parametrize("name", ["eagle", "standalone"])
def test_what_breaks_is_found_in_a_draft_models_pool(start, name):
    """A flipped bit in each source, and each fault of the core, where only the draft model reads."""
    engine = start(name)

    def prompts(seed):
        return [prompt[:24] for prompt in engine.setup.traffic(seed, 4)]

    engine.serve(prompts=prompts(3), new_tokens=4)
    for seed, source in enumerate(engine.regions()["draft/full"]["sources"]):
        slot = engine.flip_and_scrub(region="draft/full", source=source, seed=seed)
        half, layer = source.split(".")
        told = [(v["kind"], v["region"], v["slot"], v["layer"], v["half"]) for v in engine.findings()["violations"]]
        assert told == [("bytes", "draft/full", slot, int(layer), half)]
    engine.flush()
    for n, fault in enumerate(FAULTS):
        for attempt in range(3):
            text = f"{fault}:warmup=2,region=draft/full"
            done = engine.inject(text=text, prompts=prompts(20 + n + 50 * attempt), new_tokens=6)
            assert len(done["injections"]) == 1, text
            assert done["explained"] == [True] or done["rewritten"] == [True], text
            if done["explained"] == [True]:
                break
        assert done["explained"] == [True], text


@pytest.mark.beyond_ci(SPECULATION)
def test_an_allocator_under_speculation_is_followed(start):
    """Random traffic with aborts and retractions: slots that were drafted into, rejected, given back and handed out
    again raise nothing, and Canary's list of free slots stays the allocator's."""
    engine = start("eagle_pressure")
    retracted = 0
    for seed in (1, 2):
        retracted += engine.storm(seed=seed, steps=40, prefix=20, new_tokens=24)["retracted"]
        assert engine.findings()["violations"] == []
        assert engine.ownership()["full"]["differences"] == []
    assert retracted > 0


@pytest.mark.beyond_ci(SPECULATION)
def test_speculation_under_the_overlap_scheduler(start):
    """A forward is issued before the last one's results are known, so requests end, and give their slots back, while
    one that writes to them is in flight: nothing is found, and both know the same slots to be free."""
    engine = start("eagle_overlap")
    served = engine.storm_overlapped(seed=5, turns=40, new_tokens=24)
    found = engine.findings()
    assert found["violations"] == []
    assert served["aborted"] > 0
    assert 0 < served["verifies"] < sum(len(output) for output in served["outputs"])
    assert found["stats"]["checked_slots"] > 0
    assert engine.ownership()["full"]["differences"] == []
    assert {"disabled", "unguarded_forward", "lifetime_off"}.isdisjoint(event["name"] for event in engine.events())


class EagleVerifyInput(SimpleNamespace):
    """As SGLang calls it."""


class NgramVerifyInput(SimpleNamespace):
    """As SGLang calls it."""


@pytest.mark.without_engine
@pytest.mark.parametrize(
    ("drafted", "tokens"),
    [
        (EagleVerifyInput(topk=1, draft_token_num=4), 4),
        (EagleVerifyInput(topk=2, draft_token_num=5), 0),
        (EagleVerifyInput(topk=2, draft_token_num=1), 1),
        (NgramVerifyInput(draft_token_num=4), 0),
        (SimpleNamespace(topk=1, draft_token_num=4), None),
    ],
)
def test_only_chains_have_a_place_for_each_token(drafted, tokens):
    """A tree's tokens share positions; what another algorithm verifies is not known."""
    assert batches.verified_tokens(SimpleNamespace(spec_info=drafted)) == tokens


@pytest.mark.without_engine
@pytest.mark.parametrize(
    ("mode", "speculates", "checked"),
    [
        ("MIXED", False, True),
        ("MIXED", True, False),
        ("EXTEND", True, True),
        ("TARGET_VERIFY", True, True),
        ("DLLM_EXTEND", False, False),
        ("SPLIT_PREFILL", False, False),
    ],
)
def test_what_does_not_follow_from_a_batch_is_not_judged(mode, speculates, checked):
    """Passes over a few layers or over tokens that change, and mixed batches whose requests speculate."""
    algorithm = SimpleNamespace(is_none=lambda: not speculates)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(name=mode), spec_algorithm=algorithm)
    assert batches.is_checked(batch) is checked


@pytest.fixture
def drafts():
    """Two requests with rows 1 and 2 of a table whose entry at position ``p`` of row ``r`` is ``100 * r + p``."""
    entries = torch.arange(3)[:, None] * 100 + torch.arange(40)
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=entries), is_draft_worker=False)
    batch = SimpleNamespace(
        seq_lens=torch.tensor([5, 8]),
        req_pool_indices=torch.tensor([1, 2]),
        out_cache_loc=None,
        reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")],
    )
    return DraftBatches(runner, ["draft/full"], RequestWriters(Writers(), entries.device)), batch


@pytest.mark.without_engine
@pytest.mark.parametrize(("page", "ends"), [(1, (11, 14)), (4, (12, 16))])
def test_all_that_a_trees_branches_may_write_is_forgotten(drafts, page, ends):
    """Behind the prefix: every slot of a branch, or all its pages (one of four slots each, which begins with a copy of
    the prefix's last ones); nothing of the requests beside it."""
    batches, batch = drafts
    worker = SimpleNamespace(draft_runner=SimpleNamespace(page_size=page), speculative_num_steps=3, topk=2)
    slots = batches.branch_slots(batch, worker)
    known = {100 * row + p for row, begin, end in ((1, 5, ends[0]), (2, 8, ends[1])) for p in range(begin, end)}
    assert set(slots[slots > 0].tolist()) == known


@pytest.mark.without_engine
def test_an_accepted_path_is_recorded_at_the_front(drafts):
    """Root and accepted tokens are recorded from the prefix on; the slots of the rest are forgotten."""
    batches, batch = drafts
    result = SimpleNamespace(
        next_token_ids=torch.tensor([21, 22, 0, 0, 31, 0, 0, 0], dtype=torch.int32), accept_lens=torch.tensor([2, 1])
    )
    view = batches.accepted(batch, torch.tensor([20, 30]), result)
    assert view.token_ids.tolist() == [20, 21, 22, 0, 30, 31, 0, 0]
    assert view.prefix_lens.tolist() == [5, 8]
    assert view.new_lens.tolist() == [4, 4]
    slots = batches.rejected_slots(batch, result)
    assert slots[slots > 0].tolist() == [107, 108, 209, 210, 211]


@pytest.mark.without_engine
def test_guesses_are_known_after_the_steps(drafts):
    """Three steps write two guesses a request: the first is what the last extend proposed, the last proposal is never
    read by the draft model itself."""
    batches, batch = drafts
    view = batches.steps(batch, 2)
    batches.guessed(view, SimpleNamespace(draft_token=torch.tensor([20, 1, 2, 3, 30, 4, 5, 6])))
    assert view.token_ids.tolist() == [1, 2, 4, 5]
    assert view.new_lens.tolist() == [2, 2]


@pytest.mark.without_engine
def test_what_is_compiled_at_start_is_what_the_draft_model_runs(drafts):
    """Padding views leave out what real ones leave out, in the same types."""
    batches, batch = drafts
    batch.out_cache_loc = torch.zeros(8, dtype=torch.int64)
    steps, extend = batches.steps(batch, 2), batches.extend(batch, torch.zeros(8, dtype=torch.int32))
    for real, padding in zip((steps, extend), batches.padding(2), strict=True):
        assert padding.token_ids.dtype == real.token_ids.dtype
        assert padding.new_lens.dtype == real.new_lens.dtype
        assert padding.positions is real.positions is None
        tables = [view.tables["draft/full"] for view in (real, padding)]
        assert len({table.write_slots is None for table in tables}) == 1


@pytest.mark.without_engine
@pytest.mark.parametrize(
    ("draft", "eagle", "states", "radix_off", "sure"),
    [
        (False, False, False, False, True),
        (True, True, False, False, True),
        (True, False, False, False, False),
        (True, False, False, True, True),
        (True, True, True, False, False),
    ],
)
def test_where_a_shared_prefix_may_end_in_anothers_token(draft, eagle, states, radix_off, sure):
    """A draft model's slot holds the next token, which requests that share the slot have in common where the prefix
    cache is keyed by pairs of tokens: of EAGLE, unless there are recurrent states; or where nothing is shared."""
    pool = SimpleNamespace(mamba_pool=None) if states else SimpleNamespace()
    runner = SimpleNamespace(
        is_draft_worker=draft,
        server_args=SimpleNamespace(disable_radix_cache=radix_off),
        spec_algorithm=SimpleNamespace(is_eagle=lambda: eagle),
        req_to_token_pool=pool,
    )
    assert shared_with_next_token(runner) is sure
    anchors = Anchors(runner)
    assert (anchors.of(torch.zeros(3)) is None) is sure
    if not sure:
        assert anchors.of(torch.zeros(3, dtype=torch.int32)).tolist() == [0, 0, 0]


@pytest.mark.without_engine
def test_expected_tokens_may_begin_later():
    """What comes before is unknown."""
    request = SimpleNamespace(origin_input_ids=[5, 6, 7], output_ids=[8])
    tokens = expected_tokens([request, None], [4, 4], torch.device("cpu"), [2, 0])
    assert tokens[:, :4].tolist() == [[-1, -1, 7, 8], [-1, -1, -1, -1]]


@pytest.mark.without_engine
def test_slots_that_are_taken_ahead_are_those_of_who_has_more_afterwards():
    """A batch that drafts ahead takes slots for all its requests at once; where the lengths do not tell whose they are,
    nobody is named."""
    requests = [SimpleNamespace(rid=name, kv=SimpleNamespace(kv_allocated_len=n)) for name, n in (("a", 4), ("b", 7))]
    batch = SimpleNamespace(reqs=requests, spec_algorithm=SimpleNamespace(is_none=lambda: False), extend_lens=[1, 1])
    writers = RequestWriters(Writers(), torch.device("cpu"))
    owners = Owners(writers)
    with owners.preparing(batch, decode=True):
        taker = owners.taker(3, None)
        other = owners.taker(2, None)
        requests[0].kv.kv_allocated_len += 1
        requests[1].kv.kv_allocated_len += 2
    requests[0].kv.kv_allocated_len = 0
    assert taker().tolist() == [writers.id("a"), writers.id("b"), writers.id("b")]
    assert other() == -1
