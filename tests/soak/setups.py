"""The engines of the soak, by name: ``ENGINE/SETUP``."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from soak.plan import Shape

ROOT = Path(__file__).parents[2]
TESTS_OF = {engine: ROOT / "plugins" / f"canary-{engine}" / "tests" for engine in ("sglang", "transformers", "vllm")}
"""Where the helpers of each engine's tests are: how to run it on a CPU."""


@dataclass(frozen=True)
class Setup:
    """``model``, ``options``: what the engine is made with. ``environment``: of its process. ``repeatable``: whether a
    round has the same answers whenever it is served from an empty cache; if so, each ``compare``-th one is served once
    more while Canary is paused; under guard where not ``pauses``."""

    engine: str
    model: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    shape: Shape = field(default_factory=Shape)
    repeatable: bool = True
    pauses: bool = True
    compare: int = 3


def setups(device: str, engines: tuple[str, ...]) -> dict[str, Setup]:
    """All of these engines that run on that device."""
    makers = {
        ("vllm", "cpu"): _vllm_on_cpu,
        ("vllm", "cuda"): _vllm_on_gpu,
        ("transformers", "cpu"): _transformers,
        ("sglang", "cpu"): _sglang_on_cpu,
        ("sglang", "cuda"): _sglang_on_gpu,
    }
    return {
        f"{engine}/{name}": setup
        for engine in engines
        for name, setup in makers.get((engine, device), lambda: iter(()))()
    }


VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


def _vllm_on_cpu() -> Iterator[tuple[str, Setup]]:
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS
    from vllm_on_cpu.setups import SETUPS

    for name, known in SETUPS.items():
        yield (
            name,
            Setup(
                "vllm",
                known.model,
                {**OPTIONS, **known.options},
                {**VLLM_ENVIRONMENT, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "all"},
                Shape(vocabulary=500),
            ),
        )

    yield from _more_vllm_on_cpu()
    environment = {**VLLM_ENVIRONMENT, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "all"}
    yield "chunks", Setup("vllm", "llama4", OPTIONS, environment, Shape(vocabulary=500))
    shape = Shape(prompt=4, new=80, vocabulary=500)
    yield "whisper", Setup("vllm", "whisper", {**OPTIONS, **SOUND}, environment, shape)


def _more_vllm_on_cpu() -> Iterator[tuple[str, Setup]]:
    """A connector that brings KV back from host memory, vLLM's other model runner, whose kernels Triton's interpreter
    runs, and models that draft (``drafter``: `speculative_config`, its model by name)."""
    from vllm_on_cpu.engine import ENVIRONMENT, OPTIONS

    environment = {**VLLM_ENVIRONMENT, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "all"}
    connector = dict(
        kv_connector="HostStore", kv_connector_module_path="vllm_on_cpu.host_store", kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )  # fmt: skip
    private = {**environment, "CANARY_LEDGER_PRIVATE": "HostStore"}
    # What a connector stores while nobody looks can't be judged when it comes back, and Canary says so. This one is a
    # test's own, and looks at nothing but tokens.
    shape = Shape(salted=0, vocabulary=500)
    with_connector = {**OPTIONS, "kv_transfer_config": connector}
    yield "connector", Setup("vllm", "llama", with_connector, private, shape, pauses=False)
    v2 = {**environment, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    yield "v2", Setup("vllm", "llama", OPTIONS, v2, Shape(prompt=60, new=8, requests=6, vocabulary=500), compare=4)
    for method, model in (("eagle", "llama_1"), ("draft_model", "llama")):
        drafter = dict(method=method, model=model, num_speculative_tokens=3, draft_tensor_parallel_size=1)
        options = {**OPTIONS, "num_gpu_blocks_override": 30, "drafter": drafter}
        yield method, Setup("vllm", "llama", options, environment, Shape(vocabulary=500))


ON_GPU: dict[str, Any] = dict(
    load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=1, max_model_len=1024, max_num_seqs=8,
    max_num_batched_tokens=256, enable_prefix_caching=True, num_gpu_blocks_override=300, disable_log_stats=True,
    gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 30,
)  # fmt: skip
"""``gpu_memory_utilization`` is only what must be free at the start; the pool has a size of its own, so that many
engines fit one GPU. A pool of 300 blocks of 16 evicts what it has cached every few rounds."""

GRAPHS: dict[str, Any] = dict(
    compilation_config={
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
    }
)
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
OFFLOAD = dict(
    kv_connector="OffloadingConnector", kv_role="kv_both",
    kv_connector_extra_config=dict(num_cpu_blocks=2048, cpu_bytes_to_use=1 << 30),
)  # fmt: skip
VLLM_ON_GPU: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", dict(GRAPHS, async_scheduling=True)),
    "window": ("mistral", GRAPHS),
    "hybrid": ("gemma3", GRAPHS),
    "chunks": ("llama4", GRAPHS),
    "mla": ("deepseek", GRAPHS),
    "ngram": ("llama", dict(GRAPHS, speculative_config=NGRAM)),
    "preempt": ("llama", dict(GRAPHS, num_gpu_blocks_override=70, max_num_batched_tokens=64)),
    "offload": ("llama", dict(kv_transfer_config=OFFLOAD, enable_prefix_caching=False, enforce_eager=True)),
    "fp8": ("llama", dict(GRAPHS, kv_cache_dtype="fp8")),
    "states": ("falcon_h1", dict(GRAPHS, enable_prefix_caching=False)),
}
"""Name: one of `gpu_models.MODELS`, and what `vllm.LLM` is given beside `ON_GPU`."""

SOUND: dict[str, Any] = dict(
    skip_tokenizer_init=False, max_model_len=96, max_num_batched_tokens=256, enable_prefix_caching=False
)
"""For a Whisper, of which a request is a sound and two or three tokens."""

SHORT_DECODES = Shape(
    prompt=300, new=400, requests=12, burst=3, gap=150, aborts=0.1, flushes=0.1, vocabulary=4000
)  # fmt: skip
"""Prompts are short and answers long, and few requests are there at a time: most forwards are small decodes."""


def _vllm_on_gpu() -> Iterator[tuple[str, Setup]]:
    for name, (model, options) in VLLM_ON_GPU.items():
        # When a load from the host is done is a matter of time, and so is what is computed beside it.
        repeatable = name != "offload"
        made = {**ON_GPU, **options}
        yield name, Setup("vllm", model, made, VLLM_ENVIRONMENT, SHORT_DECODES, repeatable=repeatable, compare=20)
    shape = replace(SHORT_DECODES, prompt=4, new=90)
    yield "whisper", Setup("vllm", "whisper", {**ON_GPU, **GRAPHS, **SOUND}, VLLM_ENVIRONMENT, shape, compare=20)


def _transformers() -> Iterator[tuple[str, Setup]]:
    shape = Shape(prompt=60, new=24, vocabulary=128)
    for model in ("llama", "gemma3"):
        yield model, Setup("transformers", model, {"model": model}, {}, shape)
    yield "generate", Setup("transformers", "generate", {}, {}, Shape(prompt=40, new=16, vocabulary=250, gap=1))


SLOW = Shape(prompt=40, new=6, requests=4, aborts=0.1)
"""For engines whose kernels Triton's interpreter runs."""

OVERLAPPED = ("mha", "swa", "pressure")
"""Served by the overlap scheduler, too."""


def _sglang_on_cpu() -> Iterator[tuple[str, Setup]]:
    from engines.setups import SETUPS, SPECULATIVE

    for name, known in {**SETUPS, **SPECULATIVE}.items():
        slow = known.environment.get("TRITON_INTERPRET") and name != "pages"
        shape = Shape(prompt=90, new=24, requests=10)
        if name == "deepseek_v4":
            shape = Shape(prompt=700, new=12, requests=4)
        elif slow:
            shape = SLOW
        # To compile what each forward calls takes longer than all that is served here.
        environment = {**known.environment, "TORCHDYNAMO_DISABLE": "1"}
        yield name, Setup("sglang", "", known.options, environment, shape)
        if name in OVERLAPPED:
            options = {**known.options, "disable_overlap_schedule": False}
            yield f"{name}_overlap", Setup("sglang", "", options, environment, shape)


EAGLE = dict(
    speculative_algorithm="EAGLE", draft_model="gpu_llama_draft", speculative_num_steps=3, speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
)  # fmt: skip
SGLANG_ON_GPU: dict[str, dict[str, Any]] = {
    "llama": {"disable_overlap_schedule": False},
    "plain": {},
    "window": {"model": "gpu_cohere2", "disable_overlap_schedule": False},
    "mla": {"model": "gpu_deepseek_v2", "disable_overlap_schedule": False},
    "eagle": {**EAGLE, "disable_overlap_schedule": False},
    "pressure": {"max_total_tokens": 1100, "chunked_prefill_size": 128, "disable_overlap_schedule": False},
    "pages_fp8": {"page_size": 16, "kv_cache_dtype": "fp8_e4m3", "disable_overlap_schedule": False},
    "gated_delta": {"model": "gpu_qwen3_5", "max_mamba_cache_size": 64},
}
"""Options of `engines.driver.Engine`, beside those of `engines.gpu_models.GPU_DEFAULTS`."""

MANY_LONG = Shape(prompt=2500, new=150, requests=40, burst=40, gap=60, aborts=0.05, vocabulary=30000)
"""Prompts of all lengths up to thousands of tokens, and as many decodes at a time as there are requests: kernels take
other paths there."""
LARGE: dict[str, Any] = dict(
    max_total_tokens=65536, chunked_prefill_size=2048, max_running_requests=48, cuda_graph_max_bs_decode=48,
    disable_overlap_schedule=False,
)  # fmt: skip
SGLANG_MANY_LONG: dict[str, dict[str, Any]] = {
    "many_long": {},
    "window_long": {"model": "gpu_cohere2"},
    "fp8_long": {"page_size": 16, "kv_cache_dtype": "fp8_e4m3"},
    "mla_long": {"model": "gpu_deepseek_v2"},
}


def _sglang_on_gpu() -> Iterator[tuple[str, Setup]]:
    for name, options in SGLANG_ON_GPU.items():
        made = {"device": "cuda", "model": "gpu_llama", **options}
        yield name, Setup("sglang", "", made, {}, replace(SHORT_DECODES, vocabulary=30000), compare=20)
    for name, options in SGLANG_MANY_LONG.items():
        made = {"device": "cuda", "model": "gpu_llama", **LARGE, **options}
        yield name, Setup("sglang", "", made, {}, MANY_LONG, compare=20)
