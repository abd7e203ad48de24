"""Real SGLang on a GPU, with CUDA graphs and its own kernels: what `tests/test_engine.py` states for a CPU. Models are
small and random; each engine has the real scheduler, in a process of its own.

``python3 -m pytest -m gpu plugins/canary-sglang/tests/gpu -k llama_graphs``: one engine, up to a minute for its start.
"""

from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest
from tools.fault_injection import FAULTS

GUARD = {"CANARY_SCRUB_BUDGET": "64MiB"}
COMMON = {"prompts": 12, "new_tokens": 32, "shared": 300, "patience_s": 400}


def setup(options=None, graphed=("DECODE",), regions=("full",), **fields):
    """Fields of a `Setup`, and the forward modes that must be seen to come from CUDA graphs."""
    known = {**COMMON, "regions": regions, **fields, "options": {"device": "cuda", **(options or {})}}
    return known, frozenset(graphed)


PREFILL_GRAPHS = {"model": "gpu_llama", "cuda_graph_max_bs_prefill": 256}
SETUPS = {
    "llama_graphs": setup({"model": "gpu_llama"}),
    "llama_eager": setup({"model": "gpu_llama", "disable_cuda_graph": True}, graphed=()),
    "llama_breakable": setup({**PREFILL_GRAPHS, "cuda_graph_backend_prefill": "breakable"}, ("DECODE", "EXTEND")),
    "llama_piecewise": setup({**PREFILL_GRAPHS, "cuda_graph_backend_prefill": "tc_piecewise"}, ("DECODE", "EXTEND")),
    "llama_pages_fp8": setup({"model": "gpu_llama", "page_size": 16, "kv_cache_dtype": "fp8_e4m3"}),
    "llama_pressure": setup({"model": "gpu_llama", "max_total_tokens": 1100, "chunked_prefill_size": 128}),
    "window": setup({"model": "gpu_cohere2"}, regions=("full", "swa")),
    "mla": setup({"model": "gpu_deepseek_v2"}),
    "eagle": setup(
        {
            "model": "gpu_llama",
            "draft_model": "gpu_llama_draft",
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        },
        regions=("full", "draft/full"),
    ),
    "standalone": setup(
        {
            "model": "gpu_llama",
            "draft_model": "gpu_llama_small",
            "speculative_algorithm": "STANDALONE",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
            # With graphs and without the overlap scheduler this SGLang merges requests that have hidden states into
            # such that have none, and ends with an index out of bounds, unguarded too. See `test_overlap`.
            "disable_cuda_graph": True,
        },
        graphed=(),
        regions=("full", "draft/full"),
    ),
    "gated_delta": setup({"model": "gpu_qwen3_5", "max_mamba_cache_size": 64}, regions=("full", "mamba")),
    "gated_delta_checkpoints": setup(
        {
            "model": "gpu_qwen3_5",
            "max_mamba_cache_size": 64,
            "mamba_radix_cache_strategy": "extra_buffer",
            "mamba_track_interval": 64,
        },
        regions=("full", "mamba"),
        new_tokens=80,
    ),
    "kimi_delta": setup({"model": "gpu_kimi_linear", "max_mamba_cache_size": 64}, regions=("full", "mamba")),
    "mamba2": setup({"model": "gpu_falcon_h1", "max_mamba_cache_size": 64}, regions=("full", "mamba")),
    "dsa": setup(
        {
            "model": "gpu_deepseek_v32",
            "attention_backend": None,
            "dsa_prefill_backend": "flashmla_sparse",
            "dsa_decode_backend": "flashmla_sparse",
            "max_total_tokens": 20480,
        },
        prompts=6,
        shared=600,
        patience_s=500,
    ),
    "dsv4": setup(
        {"model": "gpu_deepseek_v4", "attention_backend": None, "max_total_tokens": 20480},
        regions=("swa", "c4", "c128", "c4_state", "c128_state"),
        environment={"SGLANG_DSV4_FP4_EXPERTS": "0"},
        prompts=6,
        new_tokens=140,
        shared=600,
        patience_s=500,
    ),
}
NEEDS = {"dsv4": "tilelang", "dsa": "sgl_kernel.flash_ops"}


# All tests of one engine go to the same worker of `pytest -n 8 --dist loadgroup`, the longest of them first.
MARKS = {name: [pytest.mark.gpu, pytest.mark.xdist_group(f"gpu_{name}")] for name in SETUPS}
MARKS["dsv4"].append(pytest.mark.first)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS[name]) for name in SETUPS])
def name(request):
    """One of `SETUPS`."""
    needed = NEEDS.get(request.param)
    if needed and find_spec(needed) is None:
        pytest.skip(f"needs {needed}, which is not installed here")
    return request.param


@pytest.fixture(scope="module")
def engine(name, launch):
    """The engine of a setup, shared by its tests; a worker has one at a time, since each takes GPU memory."""
    if "canary" not in {point.name for point in entry_points(group="sglang.srt.plugins")}:
        pytest.fail("canary-sglang is on the path, but not installed: SGLang finds its plugins by their entry points")
    process = launch(SETUPS[name][0], **GUARD)
    yield process
    process.close()


def test_clean_traffic_raises_nothing(engine, name, record_property):
    """Mixed traffic with shared prefixes and chunked prefills, two seeds twice over, on top of the engine's own warm-up
    and capture: forwards come from CUDA graphs, each is checked, nothing is found."""
    traffic, steps, graphed, hits = engine.setup, 0, set(), 0
    for seed in (0, 0, 1, 1):
        served = engine.serve(prompts=traffic.traffic(seed), new_tokens=traffic.new_tokens)
        steps += served["steps"]
        graphed |= {mode for mode, count in served["graphed"].items() if count}
        hits += sum(served["cached"])
    found = engine.findings()
    stats = found["stats"]
    record_property("steps", steps)
    record_property("graphed", " ".join(sorted(graphed)))
    record_property("checked_slots", stats["checked_slots"])
    assert found["violations"] == []
    assert hits > 0
    assert stats["checked_slots"] > 0
    assert stats["recorded_slots"] > 0
    assert graphed >= SETUPS[name][1]
    assert set(engine.setup.regions) <= set(engine.regions())
    assert stats["forwards"] == steps
    assert stats["checked_forwards"] == steps * sum("/" not in region for region in engine.regions())
    assert stats["unknown_slots"] == 0
    for draft in found["drafts"].values():
        assert draft["checked_slots"] > 0
        assert draft["unknown_slots"] == 0


def test_what_is_guarded_is_told_at_start(engine, record_property):
    """The attach and its coverage are events; nothing went wrong so far."""
    events = engine.events()
    coverages = [event for event in events if event["name"] == "coverage"]
    left_out = [item for event in coverages for item in event["uncovered"]]
    record_property("coverage_ratio", " ".join(str(event["coverage_ratio"]) for event in coverages))
    record_property("uncovered", " ".join(item["name"] for item in left_out))
    assert all(event["coverage_ratio"] > 0 for event in coverages)
    assert all(item["bytes"] and item["reason"] for item in left_out)
    assert {"disabled", "silence", "start_failed"}.isdisjoint(event["name"] for event in events)


def test_canary_and_the_allocator_agree_on_every_slot(engine):
    """After traffic the slots that Canary holds to be free are those of the allocator's own list, in each region that
    an allocator hands out; speculation, which takes slots ahead of their use, is no exception."""
    engine.serve(prompts=engine.setup.traffic(2), new_tokens=engine.setup.new_tokens)
    told = engine.ownership()
    assert told
    assert {region: about["differences"] for region, about in told.items()} == {region: [] for region in told}
    assert engine.findings()["violations"] == []
    assert "lifetime_off" not in {event["name"] for event in engine.events()}


def test_a_flipped_bit_is_found_in_every_source(engine, record_property):
    """One bit in any layer's K, V or latent, data or scale, indexer included, in any region whose slots stay as they
    were written: one finding, which names slot, layer and half."""
    flipped = 0
    engine.serve(prompts=engine.setup.traffic(3), new_tokens=engine.setup.new_tokens)
    assert engine.findings()["violations"] == []
    for region, about in engine.regions().items():
        for seed, source in enumerate(about["sources"] if about["kind"] != "state" else ()):
            slot = engine.flip_and_scrub(region=region, source=source, seed=seed)
            found = engine.findings()["violations"]
            half, layer = source.split(".")
            told = [(v["kind"], v["region"], v["slot"], v["layer"], v["half"]) for v in found]
            assert told == [("bytes", region, slot, int(layer), half)]
            flipped += 1
    record_property("flipped_sources", flipped)
    engine.flush()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_as_what_it_is(engine, fault, record_property):
    """The faults of the core, injected through its own syntax into each region. Bytes of a slot that is freed and
    written again before anybody looks are nobody's; then the fault is injected once more."""
    for number, region in enumerate(engine.setup.faulty(fault)):
        for attempt in range(3):
            # Not cached by the region before: of a cached prompt a draft model reads but a token that nobody knows.
            prompts = engine.setup.traffic(4 + FAULTS.index(fault) + 10 * attempt + 100 * number, 6)
            # Among decodes the next time: a prefill in chunks writes over a request's whole ring again and again.
            begin = engine.findings()["stats"]["forwards"] + 40 * attempt if attempt else 3
            text = f"{fault}:warmup={begin},region={region}"
            done = engine.inject(text=text, prompts=prompts, new_tokens=engine.setup.new_tokens)
            assert len(done["injections"]) == 1
            assert done["explained"] == [True] or done["rewritten"] == [True]
            if done["explained"] == [True]:
                break
        assert done["explained"] == [True]
        record_property(f"found_{region}", done["injections"][0].get("source", "mapping"))


def test_a_flush_leaves_nothing_behind(engine):
    """After ``flush_cache`` slots are reused by other requests without a finding."""
    traffic = engine.setup
    engine.serve(prompts=traffic.traffic(5, 4), new_tokens=traffic.new_tokens)
    engine.findings()
    assert engine.flush()
    engine.serve(prompts=traffic.traffic(6, 4), new_tokens=traffic.new_tokens)
    assert engine.findings()["violations"] == []


def test_the_host_waits_no_more_than_without_a_guard(engine, record_property):
    """While the engine serves, Canary waits for the device nowhere and allocates none of its memory: the profiler
    counts no more such calls than without it. Once before to warm up. The engine itself allocates now and then, so what
    Canary did would be there each time that it guards."""
    traffic = engine.setup
    counts = {True: [], False: []}
    for guarded in (True, False, True, False, True):
        counts[guarded].append(
            engine.waits(prompts=traffic.traffic(9, 6), new_tokens=traffic.new_tokens, guarded=guarded)
        )
    record_property("waits_guarded", str(counts[True][1:]))
    record_property("waits_unguarded", str(counts[False]))
    assert engine.findings()["violations"] == []
    least = {call: min(each.get(call, 0) for each in counts[True][1:]) for call in counts[True][1]}
    most = {call: max(each.get(call, 0) for each in counts[False]) for call in least}
    assert {call: n for call, n in least.items() if n > most[call]} == {}


def test_outputs_are_those_of_an_unguarded_engine(engine):
    """Canary changes nothing that the engine computes, and once uninstalled it is gone. The last test of an engine."""
    traffic = engine.setup
    outputs = []
    for _ in range(2):
        engine.flush()
        outputs.append(
            [engine.serve(prompts=traffic.traffic(seed), new_tokens=traffic.new_tokens)["outputs"] for seed in (7, 8)]
        )
        engine.uninstall()
    assert outputs[0] == outputs[1]
    assert len({tuple(o) for o in outputs[0][0]}) > 1
    assert engine.findings() == {"violations": [], "stats": {}, "drafts": {}}
