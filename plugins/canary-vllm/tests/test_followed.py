"""What vLLM does beside serving ordinary requests: it ends, goes on with a session, schedules in ways of its own."""

import gc
import inspect
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from canary_vllm.batches.requests import Requests
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded

from canary_adapters import embedding_numbers
from canary_core import Writers

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]
LLAMA = pytest.mark.parametrize("engine", ["llama"], indirect=True)


@LLAMA
def test_an_engine_that_ends_takes_its_guard_with_it(engine):
    """Else the KV cache of the next engine in this process would not fit beside that of the last."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    small, ended = engine.small, []
    with guarded.guard(small) as guard:
        small.serve(guarded.prompts("ends", 2), 4)
        canary = ref(guard.canary)
        worker = SimpleNamespace(model_runner=small.runner, shutdown=lambda: ended.append(len(HOOKS.sessions)))
        WorkerWrapperBase.shutdown(SimpleNamespace(worker=worker))
        small.scheduler.shutdown()
        assert ended == [0]
        assert not HOOKS._recorders
        assert "schedule" not in vars(small.scheduler)
        assert not guard.findings.violations
        small.serve(guarded.prompts("after", 2), 4)
    gc.collect()
    assert canary() is None


@LLAMA
def test_the_next_turn_of_a_streaming_session_is_silent(engine):
    """vLLM drops the last sampled token of a session and puts the next turn's tokens there."""
    from vllm.v1.request import Request

    small = engine.small
    if "resumable" not in Request.__init__.__code__.co_varnames:
        pytest.skip("this vLLM's requests have no further turns")

    def turn(tokens):
        small.submit("s", tokens, 6, resumable=True)
        for _ in range(12):
            waiting = [r.status.name for r in small.scheduler.requests.values()]
            if all(status == "WAITING_FOR_STREAMING_REQ" for status in waiting):
                return
            small.step()

    with guarded.guard(small) as guard:
        for tokens in (range(5, 25), [300, 301, 302, 303], [7]):
            turn(list(tokens))
        assert guard.trouble() == []
        assert guard.canary.stats()["forwards"] > 15


@LLAMA
@pytest.mark.older_release
def test_a_scheduler_that_is_not_followed_any_more_raises_no_finding(engine):
    """Requests may begin with blocks that the same forward writes; nobody tells which."""
    small = engine.small
    with guarded.guard(small) as guard:
        small.serve(guarded.prompts("warm"), 4, "w")
        (recorder,) = HOOKS._recorders.values()
        with recorder._guard("test"):
            raise RuntimeError("something of ours")
        for turn in range(3):
            small.serve(guarded.prompts(f"lost {turn}"), 8, f"r{turn}")
        trouble = guard.trouble()
        assert trouble
        assert all(text.startswith("lifetime_off ") for text in trouble)
        assert guard.canary.stats()["checked_slots"] > 1000


@LLAMA
def test_a_scheduler_with_a_schedule_of_its_own_is_followed(engine):
    """Whatever its class is: a function of the base class alone would not be called."""
    small, kept = engine.small, []
    own = type(small.scheduler)

    class Scheduler(own):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.schedule_as_usual = inspect.unwrap(own.schedule).__get__(self)

        def schedule(self, *args, **kwargs):
            kept.append(1)
            return self.schedule_as_usual(*args, **kwargs)

    before, small.core.scheduler.__class__ = small.scheduler, Scheduler
    try:
        with guarded.guard(small) as guard:
            for turn in range(3):
                small.serve(guarded.prompts(f"own {turn}"), 6, f"o{turn}")
            (recorder,) = HOOKS._recorders.values()
            assert kept
            assert recorder._message.number > 10
            assert guard.trouble() == []
    finally:
        before.__class__ = own
        small.core.scheduler.__class__ = own


@pytest.mark.without_engine
def test_requests_with_embeddings_are_known():
    """Their tokens stand for nothing: numbers of the embeddings are expected in their place."""
    requests = Requests(Writers(), torch.device("cpu"))
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    about = {"block_ids": ([1],), "lora_request": None, "prompt_token_ids": [0, 0]}
    new = [
        SimpleNamespace(req_id="text", prompt_embeds=None, **about),
        SimpleNamespace(req_id="given", prompt_embeds=torch.zeros(2, 4), **about),
    ]
    output = SimpleNamespace(finished_req_ids=set(), scheduled_cached_reqs=cached, scheduled_new_reqs=new)
    requests.notice(output)
    assert "given" in requests.embedded
    assert "text" not in requests.embedded
    token_ids, expected = requests.tokens(["text", "given"], lambda: [0, 0], [2, 2], torch.zeros(4, dtype=torch.int32))
    numbers = embedding_numbers(torch.zeros(2, 4)).tolist()
    assert token_ids.tolist() == [0, 0, *numbers]
    assert expected[:, :2].tolist() == [[0, 0], numbers]


@LLAMA
def test_a_runner_that_computes_in_its_own_way_is_told(engine, monkeypatch):
    """A class of one's own, of which vLLM's is the base: what is hooked there is never called."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    small = engine.small
    if not isinstance(small.runner, GPUModelRunner):
        pytest.skip("a V2 runner has no function of its own around the model")

    def own_way(runner, input_ids=None, positions=None, intermediate_tensors=None, inputs_embeds=None, **more):
        return runner.model(input_ids, positions, intermediate_tensors, inputs_embeds, **more)

    asked = guarded.prompts("own way", 3)
    with guarded.guard(small) as guard:
        monkeypatch.setattr(type(small.runner), "_model_forward", own_way, raising=False)
        answers = small.serve(asked, 8)
        (told,) = guard.findings.told("silence")
        assert type(small.runner).__name__ in told.fields["reason"]
        assert guard.canary.stats()["forwards"] == 0
    monkeypatch.undo()
    small.renew()
    assert small.serve(asked, 8) == answers


@LLAMA
def test_the_guard_knows_whose_it_is(engine, monkeypatch):
    """Rank, replica and the name under which vLLM serves are those of vLLM's configuration; here
    of an engine that is made like the second data-parallel one. Settings of the user's own win."""
    small = engine.small
    config = small.runner.vllm_config
    monkeypatch.setattr(config.parallel_config, "data_parallel_index", 1)
    monkeypatch.setattr(config.model_config, "served_model_name", ["tiny", "other name"])
    with guarded.guard(small) as guard:
        whose = guard.canary.config
        assert (whose.rank, whose.replica, whose.served_model) == (0, 1, "tiny")
    with guarded.guard(small, rank=3, replica=2, served_model="mine") as guard:
        whose = guard.canary.config
        assert (whose.rank, whose.replica, whose.served_model) == (3, 2, "mine")
