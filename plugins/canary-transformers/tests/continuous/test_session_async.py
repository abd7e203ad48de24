"""Asynchronous batching and padded inputs, which the engine itself only does on a GPU: its own code, run on a CPU.

Streams and events are replaced by ones that do nothing: on a CPU everything is done when it is issued, which is the
order that a stream keeps. What is real is all of the host's side: batch N+1 is prepared, scheduled, preempted and freed
before batch N is known, tokens are carried over on the device, and buffers take turns.
"""

import importlib

import pytest
import torch
from canary_transformers.continuous import compat
from tiny.batching import AtStep, Traffic, serve
from tiny.instant import run_asynchronous_batches_on_cpu
from tiny.models import batching

from canary_core import Kind, hookimpl
from canary_core.testing import TokenOracle

MODULES = "transformers.generation.continuous_batching"


@pytest.fixture
def engine_on_cpu(monkeypatch):
    """Makes asynchronous batching run without a GPU."""
    run_asynchronous_batches_on_cpu(monkeypatch)


@pytest.fixture
def padded(monkeypatch):
    """Pads tokens, rows and lists as for CUDA graphs."""
    runner = importlib.import_module(f"{MODULES}.model_runner").ModelRunner
    original = runner.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.pad_inputs = True
        self.cb_config.q_padding_interval_size, self.cb_config.kv_padding_interval_size = 16, 64

    monkeypatch.setattr(runner, "__init__", init)
    monkeypatch.setattr(runner, "warmup", lambda self, model: self.run_one_warmup(model, 8, 8))


class Unknown:
    """Counts the tokens that are only filled in on the device."""

    def __init__(self):
        self.tokens = 0

    @hookimpl
    def canary_pre_forward(self, canary, batch):
        self.tokens += int((batch.token_ids == -1).sum())


LOADS = {
    "plain": {},
    "samples": {"samples": 3, "requests": 4},
    "tight": {"pages": 10, "batch_tokens": 32, "requests": 10, "new_tokens": 16},
}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("seed", [0, 1])
def test_asynchronous_batches_raise_no_alarm(kind, load, seed, engine_on_cpu, guard):
    """Tokens that the host does not know yet, requests that end or are preempted while their next batch runs."""
    shape = Traffic(seed=seed, options={"use_async_batching": True}, **LOADS[load])
    bare = serve(batching(kind), shape)
    guarded, seen = guard(batching(kind), mode="raise"), Unknown()
    guarded.register(seen)
    assert serve(batching(kind), shape) == bare
    assert guarded.violations == []
    assert guarded.stats()["forwards"] > 10
    assert guarded.stats()["sampled_tokens"] > 0
    assert seen.tokens > 0


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_padded_batches_raise_no_alarm(kind, asynchronous, padded, engine_on_cpu, guard):
    """Padding is nobody's; a warm-up through the same function is neither judged nor recorded."""
    shape = Traffic(options={"use_async_batching": asynchronous}, pages=24, batch_tokens=32)
    bare = serve(batching(kind), shape)
    guarded = guard(batching(kind), mode="raise")
    assert serve(batching(kind), shape) == bare
    assert guarded.violations == []
    assert guarded.stats()["checked_slots"] > 0


def test_a_flipped_bit_is_found_in_asynchronous_batches(engine_on_cpu, guard):
    """The same findings as in any other batch."""
    guarded = guard(batching("llama"))

    def flip(canary, batch):
        region = canary.regions["full_attention"]
        source = region.sources[3]
        source.tensor.view(torch.uint8).view(-1)[::32] ^= 1
        return True

    guarded.register(AtStep(6, flip))
    serve(batching("llama"), Traffic(options={"use_async_batching": True}))
    assert {v.kind.name for v in guarded.violations} == {"BYTES"}


def test_exchanged_carried_tokens_are_found(engine_on_cpu, guard, monkeypatch):
    """The token that one batch sampled is carried over, on the device, to the next one's input. Once two requests get
    each other's: both are told, with what was sampled for them."""
    ios = importlib.import_module(f"{MODULES}.input_outputs").ContinuousBatchingAsyncIOs
    original, exchanged = ios.carry_over_tokens, []

    def carry_over(self, input_ids, carry_over_ids, prev_output_ids):
        rows = carry_over_ids[carry_over_ids >= 0][:2].tolist()
        first, second = prev_output_ids[0, rows].tolist() if len(rows) == 2 else (0, 0)
        if not exchanged and first != second:
            exchanged.append((first, second))
            prev_output_ids = prev_output_ids.clone()
            prev_output_ids[0, rows] = prev_output_ids[0, rows[::-1]]
        original(self, input_ids, carry_over_ids, prev_output_ids)

    monkeypatch.setattr(ios, "carry_over_tokens", carry_over)
    guarded = guard(batching("llama"), incident_tokens=True)
    serve(batching("llama"), Traffic(options={"use_async_batching": True}))
    ((first, second),) = exchanged
    found = [(v.token, v.stored_token) for v in guarded.violations if v.kind is Kind.WRITE_INPUT]
    assert sorted(found) == sorted([(first, second), (second, first)])
    assert all("the sampler gave" in v.explanation for v in guarded.violations if v.kind is Kind.WRITE_INPUT)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_answer_is_right(asynchronous, engine_on_cpu, guard, monkeypatch):
    """An oracle speaks in the place of the model: it reads each sequence through the engine's own list of slots, so the
    right answer to each prompt is known. Chunked prefills, prefix hits and carried tokens give no other."""
    runner = importlib.import_module(f"{MODULES}.model_runner").ModelRunner
    run, sample = runner._forward_process_and_sample, runner._sample
    oracle, current = TokenOracle(slots=1 << 16, vocabulary=500), {}

    def forward(self, model, batch_data, *others):
        current.update(batch_data)
        run(self, model, batch_data, *others)

    def speak(self, scores, output_ids):
        (write, *_), (read, *_) = current["write_index"], current["read_index"]
        oracle.store(write, current["input_ids"][0, : len(write)])
        slots = read if read.numel() else write
        first, sequences = 0, []
        for request in compat.requests(self.inputs_and_outputs):
            length = request.state.position_offset if read.numel() else request.query_length
            sequences.append((request.has_new_token, slots[first : first + length]))
            first += length
        told = [oracle.read(row) for sampled, row in sequences if sampled]
        oracle.speak(scores[0, : len(told), :500], told)
        scores[0, :, 500:] = -1
        sample(self, scores, output_ids)

    monkeypatch.setattr(runner, "_forward_process_and_sample", forward)
    monkeypatch.setattr(runner, "_sample", speak)
    shape = Traffic(options={"use_async_batching": asynchronous}, requests=6)
    guarded = guard(batching("llama"))
    answers = serve(batching("llama"), shape)
    assert guarded.violations == []
    right = [oracle.answer(prompt, shape.new_tokens) for prompt in shape.prompts()]
    assert sorted(answers.values()) == sorted(right)
