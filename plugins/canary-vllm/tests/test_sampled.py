"""What vLLM's sampler gave, against what the next forward computes. Clean traffic: `test_engine`."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from canary_vllm.batches import sampled
from vllm_on_cpu import guarded

from canary_core import Kind, Patches

pytestmark = pytest.mark.timeout(600)
REPEATED = [5, 6, 7, 8] * 6
"""A prompt after which n-grams are drafted."""


def of(name: str, process: int = 0):
    """An engine of `vllm_on_cpu.setups`."""
    return pytest.param(name, marks=pytest.mark.xdist_group(f"process {process}"))


@pytest.mark.parametrize("engine", [of("llama"), of("async"), of("hybrid", 1), of("ngram", 1)], indirect=True)
def test_requests_that_get_each_others_token_are_named(engine):
    """Two requests of a decode compute the token that was sampled for the other: each is named, also
    where the host does not know them yet, and where others were drafted behind them."""
    small = engine.small
    with guarded.guard(small) as guard:
        small.submit("a", REPEATED, 12)
        small.submit("b", [token + 50 for token in REPEATED], 12)
        while min(len(small.answers[name]) for name in "ab") < 3:
            small.step()
        usual, exchanged = small.runner._prepare_input_ids, []

        def exchange(*args, **kwargs):
            usual(*args, **kwargs)
            ids, starts = small.runner.input_ids.gpu, small.runner.query_start_loc.np
            first, second = (int(starts[row]) for row in (0, 1))
            if not exchanged and int(ids[first]) != int(ids[second]):
                exchanged.append({int(ids[first]), int(ids[second])})
                ids[[first, second]] = ids[[second, first]].clone()

        small.runner._prepare_input_ids = exchange
        try:
            while not exchanged and small.step():
                pass
        finally:
            del small.runner._prepare_input_ids
        guard.canary.drain()
        found = [v for v in guard.findings.violations if v.kind is Kind.WRITE_INPUT]
    assert sorted(v.request for v in found) == ["a", "b"]


@pytest.mark.parametrize("engine", [of("async")], indirect=True)
def test_the_asynchronous_engine_is_asynchronous(engine):
    """vLLM's platform of CPUs switches asynchronous scheduling off; here it is on, in scheduler and runner: batches are
    made before the tokens of the batch before are known, guarded, and nothing is found."""
    small, made, ahead = engine.small, [], []
    with guarded.guard(small) as guard:
        assert type(small.scheduler).__name__ == "AsyncScheduler"
        assert small.runner.use_async_scheduling
        patches = Patches()
        patches.follow(small.scheduler, "schedule", lambda output, *_, **__: made.append(output))
        patches.follow(small.scheduler, "update_from_output", lambda _, known, *__: ahead.append(known is not made[-1]))
        small.serve([REPEATED, [token + 50 for token in REPEATED]], 12)
        patches.undo()
        assert guard.trouble() == []
        assert guard.canary.stats()["sampled_tokens"] > 0
    # Of the engine's own objects: an earlier test may have left a batch on its way.
    assert sum(ahead) > 5
    assert len(made) > 12


@pytest.mark.without_engine
def test_what_was_rejected_or_is_of_an_unfinished_prompt_is_left_out():
    """The V2 runner's rejected tokens and chunks of prompts: -1, and the row's number. Columns before a row's first
    draft leave earlier positions as known: -2."""
    output = SimpleNamespace(
        sampled_token_ids=torch.tensor([[11, 12], [21, 22], [31, 32]]), num_sampled=torch.tensor([2, 1, 0])
    )
    batch = SimpleNamespace(
        num_reqs=3,
        num_computed_prefill_tokens_np=np.array([9, 9, 4]),
        num_scheduled_tokens=np.array([2, 2, 3]),
        prefill_len_np=np.array([9, 9, 20]),
        is_prefilling_np=np.array([False, False, True]),
        cu_num_logits_np=np.array([0, 2, 4, 5]),
    )
    tokens, without = sampled.of_v2(output, batch)
    assert tokens.tolist() == [[11, 12], [21, -1], [-2, -1]]
    assert without == [2]
