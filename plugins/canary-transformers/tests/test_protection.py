"""``CANARY_ON_VIOLATION``: what is done about corrupted KV before an answer is given out. The real engine; bits are
flipped from outside, by the engine's own tables."""

import random
from types import SimpleNamespace

import canary_transformers
import pytest
import torch
from canary_transformers.conformance.continuous import ContinuousSession
from canary_transformers.continuous import compat
from canary_transformers.errors import WithheldError
from tiny import parked_flips, repaired_flips
from tiny.batching import HAS_POOL, Traffic, serve
from tiny.generation import generate, new_cache, prompts
from tiny.instant import run_asynchronous_batches_on_cpu
from tiny.models import batching, generating
from tiny.parked_flips import flip_parked, free_blocks

from canary_core import Kind
from canary_core.testing import Findings

pytestmark = pytest.mark.usefixtures("one_thread")
needs_pool = pytest.mark.skipif(not HAS_POOL, reason="on Transformers 5.17 nothing can be done, as an event tells")
PROMPT = [random.Random("protection").randrange(3, 120) for _ in range(30)]
OTHER = [random.Random("other").randrange(3, 120) for _ in range(21)]
NEW = 10
FINITE = (23,)
"""A bit whose flip makes no NaN: this engine's attention multiplies the whole batch's V by a mask, so that a NaN of one
request is one of all."""
QUIET = dict(read_check=0, scrub_budget="0", log_level="error")


class Served:
    """Continuous batching under guard, turn by turn. ``right``: answers of an unguarded engine, by prompt."""

    def __init__(self, model="llama", asynchronous=False, **settings):
        self.session = ContinuousSession(model, asynchronous)
        self.right = []
        for number, prompt in enumerate((PROMPT, OTHER)):
            self.submit(f"plain-{number}", prompt)
            self.right.append(self.finish()[f"plain-{number}"])
        self.session.close()
        self.session = ContinuousSession(model, asynchronous)
        self.findings = Findings()
        self.guard = canary_transformers.guard(self.session._model, **{**QUIET, "on_violation": "protect", **settings})
        self.guard.register(self.findings)
        self.results = {}

    def submit(self, name, prompt, streaming=True, tokens=NEW):
        self.session.submit(name, prompt, tokens)
        if not streaming:
            queue = self.session._manager.input_queue
            state = queue.get_nowait()
            state.streaming = False
            queue.put(state)

    def begin(self, name, prompt=PROMPT, tokens=3):
        """A streaming request that has given out so many tokens."""
        self.submit(name, prompt)
        while len(self.session.answer(name)) < tokens:
            self.session.step()

    def finish(self, each=lambda: None):
        """Serves to the end, which must come."""
        for _ in range(300):
            if not self.session.step():
                return {name: list(answer) for name, answer in self.session._answers.items()}
            each()
        pytest.fail("requests never end")

    def told(self, *names):
        return {name: [event.fields["request"] for event in self.findings.told(name)] for name in names}

    @property
    def acted(self):
        return self.told("recomputed", "aborted")


@pytest.fixture
def served():
    """Makes `Served`; ended after the test."""
    made = []

    def start(*args, **kwargs):
        made.append(Served(*args, **kwargs))
        return made[-1]

    yield start
    for one in made:
        one.guard.close()
        one.session.close()


@needs_pool
def test_no_wrong_answer_from_parked_kv_that_changed():
    """Bits flip in the prefix cache, each in a block that the next request hits. By default wrong answers are given
    out; with protect each one is right, none ends with an error, and no block is lost."""
    plain = parked_flips.continuous(2, "report")
    assert plain.wrong > 0
    told = parked_flips.continuous(2, "protect")
    assert (told.wrong, told.error, told.right) == (0, 0, told.asked)
    assert told.flipped == told.recomputed == told.asked
    assert told.leaked == 0


@needs_pool
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hit_on_changed_kv_is_computed_again_and_others_go_on(served, asynchronous, monkeypatch):
    """Before a token is given out, also where the next batch is under way; what was computed from it is evicted."""
    if asynchronous:
        run_asynchronous_batches_on_cpu(monkeypatch)
    engine = served(asynchronous=asynchronous)
    engine.submit("first", PROMPT)
    engine.finish()
    free = free_blocks(engine.session)
    engine.begin("well", OTHER)
    assert flip_parked(engine.session, PROMPT, random.Random(7), FINITE)
    engine.submit("ill", PROMPT)
    answers = engine.finish()
    assert [answers["ill"], answers["well"]] == engine.right
    assert engine.acted == {"recomputed": ["ill"], "aborted": []}
    assert free_blocks(engine.session) == free
    engine.submit("after", PROMPT)
    assert engine.finish()["after"] == engine.right[0]
    assert engine.acted["recomputed"] == ["ill"]


@needs_pool
@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("mode", ["protect", "quarantine"])
def test_what_changes_in_a_running_request_where_all_reads_are_compared(served, model, mode):
    """The slot may have changed within the forward before, after it was compared: a streaming request ends with an
    error that has no token; with quarantine it is computed again, and keeps its tokens. Also where groups of layers
    share blocks."""
    engine = served(model, read_check=-1, on_violation=mode)
    engine.begin("ill", tokens=5)
    engine.session.poke(1, "k", "ill", 5)
    answer = engine.finish()["ill"]
    if mode == "protect":
        assert (answer, "try again" in engine.session.error("ill")) == ([], True)
        assert engine.acted == {"recomputed": [], "aborted": ["ill"]}
    else:
        assert answer == engine.right[0]
        assert engine.acted == {"recomputed": ["ill"], "aborted": []}


@needs_pool
@pytest.mark.parametrize("streaming", [False, True])
def test_no_wrong_answer_from_kv_that_changes_within_a_forward(served, streaming):
    """All reads are compared, and a slot changes after that, before attention reads it. A streaming request ends with
    an error; another one begins again with its prompt."""
    engine, changed = served(read_check=-1), []
    layer = engine.session._model.model.layers[1]
    engine.submit("ill", PROMPT, streaming)

    def change(*_):
        state = engine.session._processor.scheduler.active_requests.get("ill")
        if not changed and state is not None and len(state.generated_tokens) == 5:
            changed.append(True)
            engine.session.poke(1, "k", "ill", 5)
            engine.session.poke(1, "v", "ill", 5)

    hook = layer.register_forward_pre_hook(change)
    answer = engine.finish()["ill"]
    hook.remove()
    assert changed
    assert answer == ([] if streaming else engine.right[0])
    assert engine.acted["aborted" if streaming else "recomputed"] == ["ill"]


@needs_pool
@pytest.mark.parametrize("streaming", [False, True])
def test_what_the_scrub_finds_in_a_running_request(served, streaming):
    """Nobody knows which tokens were computed from the slot. Where none was given out, all is computed again from the
    prompt; a streaming request ends with an error that has no token."""
    engine = served(scrub_budget="1MiB")
    free = None
    engine.submit("ill", PROMPT, streaming)
    for _ in range(5):
        engine.session.step()
        free = free_blocks(engine.session) if free is None else free
    engine.session.poke(1, "k", "ill", 5)
    answer = engine.finish()["ill"]
    if streaming:
        assert answer == []
        assert "try again" in engine.session.error("ill")
        assert engine.acted == {"recomputed": [], "aborted": ["ill"]}
    else:
        assert answer == engine.right[0]
        assert engine.acted == {"recomputed": ["ill"], "aborted": []}
    assert free_blocks(engine.session) >= free


@needs_pool
def test_what_is_always_wrong_ends_with_an_error(served):
    """A fault that comes back whatever is done: the request is computed again twice, then ends; no block is lost."""
    engine = served(read_check=-1)
    free = None
    engine.submit("ill", PROMPT, streaming=False)

    def again():
        tables = engine.session._cache.layer_to_allocator[0].block_table
        if "ill" in tables:
            engine.session.poke(0, "v", "ill", 1)

    engine.session.step()
    free = free_blocks(engine.session) + len(engine.session._cache.layer_to_allocator[0].block_table["ill"])
    engine.finish(again)
    assert engine.session.error("ill") is not None
    assert engine.acted == {"recomputed": ["ill"] * 2, "aborted": ["ill"]}
    assert free_blocks(engine.session) == free


@needs_pool
def test_a_scheduler_that_refuses_ends_the_request(served):
    """It can't be queued again: it ends with an error, the next one is served, and no block is lost."""
    engine = served()
    engine.submit("first", PROMPT)
    engine.finish()
    free = free_blocks(engine.session)
    scheduler = engine.session._processor.scheduler
    engine.submit("ill", PROMPT)
    flip_parked(engine.session, PROMPT, random.Random(7), FINITE)
    add = scheduler.add_waiting_request

    def refuse(state):
        if state._true_initial_tokens:
            raise RuntimeError("full")
        add(state)

    scheduler.add_waiting_request = refuse
    engine.finish()
    assert engine.session.error("ill") is not None
    assert engine.acted == {"recomputed": [], "aborted": ["ill"]}
    assert len(engine.findings.told("quarantine_failed")) == 1
    assert free_blocks(engine.session) == free
    engine.submit("after", PROMPT)
    assert engine.finish()["after"] == engine.right[0]


@needs_pool
def test_a_verdict_after_its_request_has_ended_only_evicts(served):
    """The scrub finds a parked slot while another request runs; nobody is computed again, and the next hit is right."""
    engine = served(scrub_budget="1MiB")
    engine.submit("first", PROMPT)
    engine.finish()
    flip_parked(engine.session, PROMPT, random.Random(7), FINITE)
    engine.submit("well", OTHER)
    assert engine.finish()["well"] == engine.right[1]
    assert len(engine.findings.told("quarantined")) == 1
    engine.submit("after", PROMPT)
    assert engine.finish()["after"] == engine.right[0]
    assert engine.acted == {"recomputed": [], "aborted": []}


@needs_pool
@pytest.mark.parametrize("mode", ["report", "quarantine"])
def test_a_bit_that_flips_in_the_prefix_cache_is_put_back(mode):
    """With ``CANARY_REPAIR``: while another request runs. The cache's bytes are what they were, nothing is evicted, and
    a request that hits them is answered right."""
    done = repaired_flips.flips(6, mode=mode)
    assert (done.told, done.repaired, done.intact, done.right, done.quarantined) == (6, 6, 6, 6, 0)
    off = repaired_flips.flips(6, repair=False)
    assert (off.told, off.repaired, off.intact) == (6, 0, 0)
    assert off.right < 6


@needs_pool
def test_abort_ends_a_request_and_its_forks_to_be(served):
    """The caller waits for each of several answers to one prompt; the block stays."""
    engine = served(on_violation="abort", hit_check=True)
    engine.submit("first", PROMPT)
    engine.finish()
    flip_parked(engine.session, PROMPT, random.Random(7), FINITE)
    engine.session._manager.num_return_sequences = 3
    engine.submit("ill", PROMPT)
    engine.finish()
    names = ["ill", "ill__child#0", "ill__child#1"]
    assert [engine.session.error(name) is not None for name in names] == [True] * 3
    assert engine.acted == {"recomputed": [], "aborted": ["ill"]}
    assert engine.findings.told("quarantined") == []


@needs_pool
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("llama", {"pages": 10, "batch_tokens": 32, "requests": 8}), ("gemma3", {"samples": 2, "requests": 3})],
)
def test_clean_traffic_is_left_alone(kind, shape, guard):
    """With hits, forks, preemption and eviction: nothing is computed again, ended or evicted."""
    load = Traffic(seed=3, **shape)
    bare = serve(batching(kind), load)
    findings = Findings()
    guarded = guard(batching(kind), on_violation="protect", read_check=0)
    guarded.register(findings)
    assert serve(batching(kind), load) == bare
    assert [findings.told(name) for name in ("recomputed", "aborted", "quarantined", "quarantine_failed")] == [[]] * 4
    assert guarded.violations == []
    assert kind == "gemma3" or guarded.stats()["hit_blocks"] > 0


@needs_pool
def test_where_nothing_can_be_done_the_reason_is_told(served):
    """Ranks of tensor parallelism; and hits that can't be compared."""
    engine = served(bytes="off")
    engine.submit("first", OTHER)
    engine.finish()
    (event,) = engine.findings.told("hits_unchecked")
    assert "CANARY_BYTES=off" in event.fields["reason"]
    processor = engine.session._processor
    assert compat.unable_to_act(processor) is None
    ranks = SimpleNamespace(cache=processor.cache, distributed_helper=SimpleNamespace(tp_size=2))
    assert "tensor parallelism" in compat.unable_to_act(ranks)


def test_generate_returns_nothing_computed_from_a_cache_that_changed():
    """A cache that is given to the next answer. With report nothing changes; with protect the caller gets an error."""
    plain = parked_flips.generated(2, "report")
    assert plain.wrong > 0
    assert plain.error == 0
    told = parked_flips.generated(2, "protect")
    assert (told.wrong, told.right, told.error) == (0, 0, 2)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generate_compares_what_it_read_before_it_returns(kind):
    """A bit that flips in the middle of an answer, without a scrub and without reads compared; the cache stays bad."""
    model = generating("llama")
    cache = new_cache(model, kind)
    ids = prompts(rows=1)
    with canary_transformers.guard(model, on_violation="protect", **QUIET):
        act = Act(model, lambda: flip_first(cache), forward=4)
        with act, pytest.raises(WithheldError, match="bytes in full"):
            generate(model, ids, cache=cache)
        assert act.done
        assert generate(model, ids).shape[1] == ids.shape[1] + 12


def test_generate_on_several_ranks_returns_and_says_so(monkeypatch):
    """One that raised alone would leave the others waiting. A fake: the model only says that it has two ranks."""
    model = generating("llama")
    monkeypatch.setattr(model, "_device_mesh", SimpleNamespace(size=lambda: 2), raising=False)
    cache, findings = new_cache(model, "dynamic"), Findings()
    with canary_transformers.guard(model, on_violation="protect", **QUIET) as guarded:
        guarded.register(findings)
        with Act(model, lambda: flip_first(cache), forward=4):
            generate(model, prompts(rows=1), cache=cache)
        assert [v.kind for v in guarded.violations] == [Kind.BYTES]
        (event,) = findings.told("quarantine_failed")
        assert "ranks" in event.fields["reason"]


def flip_first(cache):
    """Flips a bit in the middle of the prompt."""
    cache.layers[1].keys[0, 0, 2].view(torch.int32)[1] ^= 1 << 23


class Act:
    """Does ``act`` before forward number ``forward`` of the model."""

    def __init__(self, model, act, forward):
        self.model, self.act, self.left, self.done = model, act, forward, False

    def __enter__(self):
        self.handle = self.model.register_forward_pre_hook(self._hook)

    def __exit__(self, *error):
        self.handle.remove()

    def _hook(self, *_):
        self.left -= 1
        if not self.left:
            self.act()
            self.done = True


@pytest.mark.parametrize(
    ("kind", "settings"), [("gemma3", {}), ("llama", {"num_beams": 3}), ("llama", {"cache_implementation": "static"})]
)
def test_clean_answers_are_returned(kind, settings):
    """The same ones, and all KV was compared."""
    model = generating(kind)
    bare = generate(model, prompts(), **settings)
    with canary_transformers.guard(model, on_violation="protect", **QUIET) as guarded:
        assert torch.equal(generate(model, prompts(), **settings), bare)
        assert guarded.violations == []
        assert guarded.stats()["hit_slots"] > 0
