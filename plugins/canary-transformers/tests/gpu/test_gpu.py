"""Real Transformers on a GPU: its streams, CUDA graphs and compiled decodes. What the tests beside this folder state
on a CPU holds here: clean traffic is silent, answers stay what they are, a flipped bit is named exactly.

``python3 -m pytest -m gpu plugins/canary-transformers/tests/gpu``: a minute or two, most of it compiling.
"""

import copy
from typing import Any

import pytest
import torch
from canary_transformers.generate.records import CacheRecords
from tiny.batching import Traffic, serve, served
from tiny.generation import CACHE, expect_clean, flip, forwards, generate, listening, new_cache, prompts
from tiny.models import WINDOW, generating
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import StaticCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs

from canary_core import Kind

DEVICE = "cuda"
FULL = {"llama": (0, 3), "gemma3": (1,)}
"""Layers of `batching` that read all of the past."""
LOOPS: dict[str, dict[str, Any]] = {
    "in step": {"use_cuda_graph": False, "use_async_batching": False},
    "graphs": {"use_cuda_graph": True, "use_async_batching": False},
    "asynchronous": {"use_cuda_graph": True, "use_async_batching": True},
}
"""How continuous batching runs; the first is what it does by itself without FlashAttention."""
DECODES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "compiled": {"cache_implementation": "static"},
}
"""Settings of `generate()`. It compiles decodes with a static cache on a GPU by itself."""

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's compiler warns of what it would do otherwise on this GPU.
    pytest.mark.filterwarnings("ignore"),
]


reset_of_the_engine = ContinuousBatchingAsyncIOs.reset


@pytest.fixture(autouse=True)
def awaited_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not wait until its lists on the device are reset (`LateReset`), and on a busy GPU that comes too
    late now and then. Here it waits."""

    def reset(lists: Any) -> None:
        reset_of_the_engine(lists)
        torch.cuda.current_stream().synchronize()

    monkeypatch.setattr(ContinuousBatchingAsyncIOs, "reset", reset)


class LateReset:
    """A bug of Transformers 5.17 to 5.24: before the first asynchronous batch the lists on the device are reset on the
    caller's stream, and neither the copy of that batch's lists nor its forward waits for this stream. Here the stream
    is busy, and the forward begins when it no longer is: both may be so on any GPU that others use, too.

    ``written``: the places that the first forward after a reset was given to write to.
    """

    BUSY_CYCLES = 200_000_000
    """About a tenth of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: torch.Tensor | None = None
        original = ContinuousBatchingAsyncIOs.get_model_kwargs

        def reset(lists: Any) -> None:
            torch.cuda._sleep(self.BUSY_CYCLES)
            reset_of_the_engine(lists)
            self.written = None

        def get_model_kwargs(lists: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = original(lists, *args, **kwargs)
            lists.compute_stream.wait_stream(torch.cuda.current_stream())
            if self.written is None:
                with torch.cuda.stream(lists.compute_stream):
                    self.written = arguments["write_index"][0].clone()
                (allocator,) = lists.io_pairs[0].device_io.cache.cache_allocators.values()
                self._page = allocator.block_physical_stride, allocator.tokens_per_page
            return arguments

        monkeypatch.setattr(ContinuousBatchingAsyncIOs, "reset", reset)
        monkeypatch.setattr(ContinuousBatchingAsyncIOs, "get_model_kwargs", get_model_kwargs)

    def slot(self, place: int) -> int:
        """Slot of the region at ``place``, a row of the engine's tensors: between pages lie those of other layers."""
        stride, slots = self._page
        return place // stride * slots + place % stride


@pytest.fixture(params=["llama", "gemma3"])
def kind(request: pytest.FixtureRequest) -> str:
    """Full attention everywhere, or windows on most layers."""
    name: str = request.param
    return name


@pytest.mark.parametrize("loop", LOOPS)
def test_continuous_batching_is_silent_and_answers_the_same(kind, loop, guard):
    """Prefills in chunks, decodes, blocks that requests share and hand on: no finding, and no answer changes."""
    model, traffic = served(kind, DEVICE), Traffic(seed=3, requests=12, options=LOOPS[loop])
    before = serve(model, traffic)
    guarded = guard(model)
    assert list(serve(model, traffic).values()) == list(before.values())
    guarded.close()
    stats = expect_clean(guarded)
    assert stats["forwards"] > 10
    assert stats["checked_slots"] > 500
    assert list(serve(model, traffic).values()) == list(before.values())


class FlippedBit:
    """Flips one bit of a running request's KV, in the engine's own tensor, right before a forward reads it."""

    POSITION = 3

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layer: int, half: str) -> None:
        self._layer, self._half = layer, half
        self.request: str | None = None
        original = ContinuousBatchProcessor.prepare_next_batch

        def prepare_next_batch(processor: Any) -> bool:
            ready: bool = original(processor)
            if ready and self.request is None:
                self._flip(processor)
            return ready

        monkeypatch.setattr(ContinuousBatchProcessor, "prepare_next_batch", prepare_next_batch)

    def _flip(self, processor: Any) -> None:
        # Of a request that decodes, and will for a while: the token was written by a forward before this one.
        running = processor.scheduler.active_requests
        name = next((n for n, s in running.items() if 4 <= len(s.generated_tokens) <= 6), None)
        if name is None:
            return
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        cell = self._cell(processor.cache, name)
        cell.view(torch.uint8).view(-1)[5] ^= 4
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.request = name

    def _cell(self, cache: Any, request: str) -> torch.Tensor:
        which = ("k", "v").index(self._half)
        if hasattr(cache, "cache_allocators"):
            allocator = cache.layer_to_allocator[self._layer]
            slots = allocator.tokens_per_page
            block = allocator.block_table[request][self.POSITION // slots]
            tensor = allocator._kv_token_views[self._layer][which]
            return tensor[block * allocator.block_physical_stride + self.POSITION % slots]
        group, place = cache.layer_index_to_group_indices[self._layer]
        block = cache.group_cache_managers[group].block_table[request][self.POSITION // cache.block_size]
        tensor = (cache.key_cache, cache.value_cache)[which][place]
        return tensor[block * cache.block_size + self.POSITION % cache.block_size]


@pytest.mark.parametrize("half", ["k", "v"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_flipped_bit_that_a_running_request_reads_is_found(kind, loop, half, guard, monkeypatch):
    """With layer, half, position and request, and nothing else is found."""
    model = served(kind, DEVICE)
    for layer in FULL[kind]:
        with monkeypatch.context() as patch:
            flipped = FlippedBit(patch, layer, half)
            guarded = guard(model)
            # Without shared prefixes, so that the slot belongs to one request.
            serve(model, Traffic(requests=4, new_tokens=14, options={**LOOPS[loop], "allow_block_sharing": False}))
            guarded.close()
        assert flipped.request is not None
        found = guarded.violations
        assert {(v.kind, v.layer, v.half, v.position, v.request) for v in found} == {
            (Kind.BYTES, layer, half, FlippedBit.POSITION, flipped.request)
        }


def test_a_reset_that_comes_after_the_first_batch_is_found(guard, monkeypatch):
    """All of the first batch's KV goes to one slot, the trash, with Canary and without."""
    model, traffic = served("llama", DEVICE), Traffic(seed=3, requests=4, options=LOOPS["asynchronous"])
    late = LateReset(monkeypatch)
    serve(model, traffic)
    assert late.written is not None
    assert len(late.written) > len(late.written.unique()) == 1
    guarded = guard(model)
    serve(model, traffic)
    guarded.close()
    (trash,) = late.written.unique().tolist()
    # Which is told first depends on which of the lists and lengths were compared in this forward.
    assert {v.kind for v in guarded.violations} <= {
        Kind.NULL_SLOT, Kind.READ_TABLE, Kind.READ_LENGTH, Kind.WRITE_INPUT, Kind.UNWRITTEN,
    }  # fmt: skip
    first = next(v for v in guarded.violations if v.kind is Kind.NULL_SLOT)
    assert (first.step, first.slot) == (1, late.slot(trash))
    assert "padding leaked into a live row" in str(first)


@pytest.mark.parametrize("name", DECODES)
def test_generate_is_silent_answers_the_same_and_compiles_nothing_more(kind, name):
    """Every forward is checked. What is compiled is what is compiled without a guard: no graph more, none broken, and
    its CUDA graphs stay."""
    ids = prompts(3, 21).to(DEVICE)
    counters = torch._dynamo.utils.counters
    outputs, compiled = [], []
    for mode in ("off", "log"):
        torch._dynamo.reset()
        counters.clear()
        model = copy.deepcopy(generating(kind)).to(DEVICE)
        with listening(model, mode=mode)[0] as watch:
            for _ in range(3):
                outputs.append(generate(model, ids, **DECODES[name]))
        skips = counters["inductor"]["cudagraph_skips"]
        compiled.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), skips))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert compiled[0] == compiled[1]
    assert (compiled[0][0] > 0) == (name == "compiled")
    assert expect_clean(watch)["forwards"] == 36


def test_a_guard_that_comes_later_compiles_nothing_again(kind):
    """A model that was compiled is guarded, let go and guarded again: the same compiled decode serves them all."""
    torch._dynamo.reset()
    model, ids = copy.deepcopy(generating(kind)).to(DEVICE), prompts(3, 21).to(DEVICE)
    expected = generate(model, ids, **DECODES["compiled"])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(3):
        with listening(model)[0] as watch:
            assert torch.equal(generate(model, ids, **DECODES["compiled"]), expected)
            assert expect_clean(watch)["forwards"] == 12
        assert torch.equal(generate(model, ids, **DECODES["compiled"]), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("half", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_a_flipped_bit_of_a_cache_is_found(kind, name, layer, half):
    """Layer, half, row and position are named, also where a window has moved on."""
    model = copy.deepcopy(generating(kind)).to(DEVICE)
    with listening(model)[0] as watch:
        cache = new_cache(model, name)
        forwards(model, cache, *(chunk.to(DEVICE) for chunk in (prompts(2, 12), prompts(2, 1), prompts(2, 3))))
        expect_clean(watch)
        window = 0 if kind == "llama" or layer == 2 else WINDOW - (name == "dynamic")
        flip(cache, layer, half, row=1, index=4)
        forwards(model, cache, prompts(2, 1).to(DEVICE))
        (found,) = watch.violations
    assert (found.kind, found.layer, found.half) == (Kind.BYTES, layer, half[0])
    assert found.position == (16 - window + 4 if window else 4)
    assert found.request is not None
    assert found.request.endswith("row 1")


@pytest.mark.parametrize("half", ["keys", "values"])
def test_a_flipped_bit_in_a_compiled_generate_is_found(kind, half):
    """Between two decodes that are replayed from CUDA graphs, in the tensor that they read."""
    model, ids = copy.deepcopy(generating(kind)).to(DEVICE), prompts(2, 6).to(DEVICE)
    cache = StaticCache(config=model.config, max_cache_len=40)
    seen = []

    def injure(given: torch.Tensor, scores: Any, **named: Any) -> torch.Tensor:
        seen.append(given.shape[1])
        if len(seen) == 7:
            flip(cache, 2, half, row=1, index=4)
        return torch.zeros(len(given), dtype=torch.bool, device=given.device)

    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    with listening(model)[0] as watch:
        model.generate(
            ids, **{CACHE: cache}, generation_config=config, stopping_criteria=StoppingCriteriaList([injure])
        )
        (found,) = watch.violations
    assert hasattr(model, "_compiled_call")
    assert (found.kind, found.layer, found.half, found.position) == (Kind.BYTES, 2, half[0], 4)
    assert found.request is not None
    assert found.request.endswith("row 1")


@pytest.mark.parametrize("name", ["static", "compiled"])
def test_static_decodes_are_issued_before_the_host_works_for_canary(name, monkeypatch):
    """Not where rows change places between them, as beams do: the cache has other tensors each time then, which are
    looked at before the forward. Outputs are the same in either case, also where a later prompt resets the cache."""
    model, ids = copy.deepcopy(generating("llama")).to(DEVICE), prompts(3, 21).to(DEVICE)
    issued_first: list[bool] = []
    original = CacheRecords.issues_first

    def issues_first(records: CacheRecords) -> bool:
        issued_first.append(original(records))
        return issued_first[-1]

    monkeypatch.setattr(CacheRecords, "issues_first", issues_first)
    for beams in (1, 3):
        settings = {**DECODES[name], "num_beams": beams, "max_new_tokens": 60}
        expected = generate(model, ids, **settings)
        issued_first.clear()
        with listening(model, read_check=0)[0] as watch:
            for _ in range(3):
                assert torch.equal(generate(model, ids, **settings), expected)
        assert expect_clean(watch)["forwards"] == 180
        if beams == 1:
            assert issued_first.count(True) > 160
    cache = StaticCache(config=model.config, max_cache_len=100)
    with listening(model, read_check=0)[0] as watch:
        for _ in range(4):
            generate(model, ids, cache=cache, disable_compile=name == "static")
            cache.reset()
    expect_clean(watch)


def test_a_loop_may_write_its_next_tokens_where_the_last_ones_were():
    """Though the record reads tokens beside what comes after the forward."""
    model = copy.deepcopy(generating("llama")).to(DEVICE)
    with listening(model, read_check=0)[0] as watch:
        cache, tokens = StaticCache(config=model.config, max_cache_len=400), prompts(16, 1).to(DEVICE)
        forwards(model, cache, prompts(16, 200).to(DEVICE), tokens)
        for step in range(150):
            forwards(model, cache, tokens)
            tokens.copy_((tokens * 5 + step) % 250 + 3)
        assert watch.stats()["forwards"] == 152
    expect_clean(watch)


def peak_of_decodes(model: Any, rows: int = 64, tokens: int = 2000) -> int:
    """Bytes that two forwards need at most beyond what is there when they begin, with a dynamic cache."""
    cache = new_cache(model, "dynamic")
    forwards(model, cache, prompts(rows, tokens).to(DEVICE), prompts(rows, 1).to(DEVICE))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = torch.cuda.memory_allocated()
    forwards(model, cache, *[prompts(rows, 1).to(DEVICE)] * 2)
    return torch.cuda.max_memory_allocated() - began


def test_a_dynamic_cache_takes_no_more_memory_while_it_grows():
    """Its 49 MB are not there twice, though every forward makes them anew."""
    model = copy.deepcopy(generating("llama")).to(DEVICE)
    plain = peak_of_decodes(model)
    with listening(model)[0] as watch:
        assert peak_of_decodes(model) < plain + (8 << 20)
    expect_clean(watch)
