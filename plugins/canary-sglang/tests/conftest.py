import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

DRIVER = Path(__file__).with_name("engine_driver.py")
TRITON = {"TRITON_INTERPRET": "1"}

UNFIT = frozenset(
    {
        ("req_to_token", "mamba"),
        ("req_to_token", "c128_state"),
        ("lost_write", "c4_state"),
        ("lost_write", "c128_state"),
    }
)
"""Faults that a region can't have: where a request's row of the table has one entry, which is written as well,
``req_to_token`` leaves its hands off; in rings lost writes are not judged."""


@dataclass(frozen=True)
class Setup:
    """An engine to test: its options, and traffic small enough for how fast it is on a CPU."""

    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    prompts: int = 12
    new_tokens: int = 8
    regions: tuple[str, ...] = ("full",)
    storm_steps: int = 300
    """Forwards of long random traffic."""
    storm_prefix: int = 20
    """Most tokens that its requests share."""
    since: str = "0"
    """First SGLang that starts this setup on a CPU."""
    left_out: frozenset[str] = frozenset()
    """Names, up to a slash, of what the coverage event lists as not guarded."""
    shared: int = 40
    """Length of the prefix that many prompts begin with; of pages of 256 tokens only whole ones are ever cached."""
    patience_s: float = 900
    """Most time for one answer of the engine's process, its start included; then it is ended."""

    @property
    def served(self) -> tuple[str, ...]:
        """The regions of the model that is served; those of others begin with their name."""
        return tuple(name for name in self.regions if "/" not in name)

    def skip_before(self) -> None:
        """Skips the test on a SGLang that doesn't start this setup."""
        installed = version("sglang")
        if Version(installed) < Version(self.since):
            pytest.skip(f"starts on a CPU from SGLang {self.since} on, this is {installed}")

    def faulty(self, fault: str) -> list[str]:
        """The regions that can have the fault."""
        return [region for region in self.regions if (fault, region.rpartition("/")[2]) not in UNFIT]

    def traffic(self, seed: int, count: int = 0) -> list[list[int]]:
        """Random prompts, ``self.prompts`` unless a smaller ``count`` is given, the same ones for a seed: more than
        half of them with a shared prefix, the first two longer than a chunk."""
        r = random.Random(seed)
        prefix = [r.randrange(3, 250) for _ in range(self.shared)]
        prompts = [[r.randrange(3, 250) for _ in range(self.shared + 30)], prefix]
        for _ in range(min(count or self.prompts, self.prompts) - 2):
            hit = prefix[: r.randrange(self.shared // 2, self.shared)] if r.random() < 0.6 else []
            prompts.append(hit + [r.randrange(3, 250) for _ in range(r.randrange(1, 30))])
        return prompts


def speculative(options: dict[str, Any] | None = None, **fields: Any) -> Setup:
    """EAGLE with a draft model of one layer, three steps and no branches, unless ``options`` say otherwise."""
    eagle = {
        "model": "llama_small",
        "draft_model": "llama_draft",
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "attention_backend": "triton",
        "dtype": "float32",
        "triton_attention_num_kv_splits": 1,
        # The size is given; draft weights, which SGLang counts, mustn't fail on a machine that others use, too.
        "mem_fraction_static": 0.5,
    }
    known: dict[str, Any] = {"prompts": 4, "new_tokens": 6, "regions": ("full", "draft/full"), **fields}
    return Setup({**eagle, **(options or {})}, {**TRITON, "TORCHDYNAMO_DISABLE": "1"}, **known)


SPECULATIVE = {
    "eagle": speculative(),
    "eagle_tree": speculative({"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}),
    "eagle_layers": speculative({"enable_multi_layer_eagle": True}, regions=("full",)),
    "eagle_pages": speculative({"page_size": 4}),
    "eagle_overlap": speculative({"max_total_tokens": 112, "disable_overlap_schedule": False}),
    "eagle_pressure": speculative(
        {"max_total_tokens": 112, "chunked_prefill_size": 32, "schedule_conservativeness": 0.1},
        prompts=5,
        new_tokens=24,
    ),
    "standalone": speculative(
        {"speculative_algorithm": "STANDALONE", "draft_model": "llama_small"}, prompts=8, new_tokens=12
    ),
    "ngram": Setup(
        {
            "model": "llama_small",
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 4,
            "speculative_ngram_min_bfs_breadth": 1,
            "speculative_ngram_max_bfs_breadth": 2,
            "attention_backend": "triton",
            "dtype": "float32",
            "triton_attention_num_kv_splits": 1,
        },
        {**TRITON, "TORCHDYNAMO_DISABLE": "1"},
        prompts=4,
        new_tokens=16,
    ),
}
"""Ways to speculate, for `test_speculation`."""

SETUPS = {
    "mha": Setup(storm_steps=600),
    "pages": Setup({"page_size": 4}, TRITON, storm_steps=200),
    "fp8": Setup({"kv_cache_dtype": "fp8_e4m3"}),
    "swa": Setup(
        {"model": "cohere2", "swa_full_tokens_ratio": 1.0},
        # Where window slots lie has a say in outputs (`torch_native` looks for them where full slots lie), so it must
        # not depend on how many forwards an engine has done before: by default every 128th of them gives slots up.
        {"SGLANG_SWA_EVICTION_INTERVAL": "1"},
        regions=("full", "swa"),
        storm_steps=500,
    ),
    "mla": Setup(
        {"model": "deepseek_v2", "attention_backend": "triton", "dtype": "float32"},
        TRITON,
        prompts=4,
        new_tokens=4,
        storm_steps=20,
        storm_prefix=8,
    ),
    "pressure": Setup(
        {"max_total_tokens": 112, "chunked_prefill_size": 32, "schedule_conservativeness": 0.1},
        prompts=16,
        new_tokens=24,
        storm_steps=600,
    ),
    "mixed": Setup({"enable_mixed_chunk": True, "chunked_prefill_size": 16}),
    "deepseek_v4": Setup(
        {
            "model": "deepseek_v4",
            "attention_backend": None,
            "max_total_tokens": 4096,
            "chunked_prefill_size": 256,
            "swa_full_tokens_ratio": 0.5,
        },
        {**TRITON, "CANARY_BACKEND": "torch", "CANARY_SCRUB_BUDGET": "64MiB"},
        prompts=5,
        new_tokens=30,
        regions=("swa", "c4", "c128", "c4_state", "c128_state"),
        shared=600,
        storm_steps=100,
        storm_prefix=600,
        since="0.5.21",
        left_out=frozenset({"swa", "c4_state", "c128_state"}),
    ),
    "hicache": Setup(
        {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 8.0,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "layer_first",
            "hicache_write_policy": "write_through",
            "max_total_tokens": 160,
        }
    ),
    "short_conv": Setup(
        {"model": "lfm2", "dtype": "float32", "max_mamba_cache_size": 16},
        {**TRITON, "CANARY_BACKEND": "torch"},
        regions=("full", "mamba"),
    ),
    "mamba2": Setup(
        {"model": "falcon_h1", "dtype": "float32", "max_mamba_cache_size": 16},
        {**TRITON, "CANARY_BACKEND": "torch"},
        prompts=4,
        new_tokens=4,
        regions=("full", "mamba"),
        storm_steps=20,
    ),
    "gated_delta": Setup(
        {"model": "qwen3_5", "dtype": "float16", "max_mamba_cache_size": 16},
        {**TRITON, "CANARY_BACKEND": "torch", "SGLANG_MAMBA_CONV_DTYPE": "float16"},
        prompts=4,
        new_tokens=4,
        regions=("full", "mamba"),
        storm_steps=8,
    ),
    "kimi_delta": Setup(
        {
            "model": "kimi_linear",
            "attention_backend": "triton",
            "dtype": "float32",
            "max_mamba_cache_size": 16,
        },
        {**TRITON, "CANARY_BACKEND": "torch", "SGLANG_MAMBA_CONV_DTYPE": "float32"},
        prompts=4,
        new_tokens=4,
        regions=("full", "mamba"),
        storm_steps=20,
        since="0.5.21",
    ),
    "radix_off": Setup({"disable_radix_cache": True}),
}


def pytest_configure(config: pytest.Config) -> None:
    """Our markers."""
    config.addinivalue_line("markers", "without_engine: runs where SGLang is not installed, too")
    config.addinivalue_line("markers", "last: leaves its engine unfit for other tests, so it runs after them")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``last`` come last among those of their engine; tests that run the engine are skipped where it isn't
    installed."""
    places: dict[str, int] = {}
    for place, item in enumerate(items):
        places.setdefault(_group(item), place)
    items.sort(key=lambda item: (places[_group(item)], item.get_closest_marker("last") is not None))
    if find_spec("sglang") is not None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("without_engine") is None:
            item.add_marker(pytest.mark.skip(reason="sglang is not installed; make test-sglang makes a place for it"))


def _group(item: pytest.Item) -> str:
    """Tests of one engine are together already; any other one is alone."""
    group = item.get_closest_marker("xdist_group")
    return item.nodeid if group is None else str(group.args[0])


class EngineProcess:
    """An `engine_driver` process. Each of its `Engine`'s methods can be called here by name, with keywords."""

    def __init__(self, setup: Setup, folder: Path, **settings: str) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_") and k != "TRITON_INTERPRET"}
        # All bytes are looked at around every forward, and what stays broken leaves room in the ring for what is new.
        canary = {
            "CANARY_PLUGINS": "sglang",
            "CANARY_READ_CHECK": "-1",
            "CANARY_STATE_INTERVAL": "1",
            "CANARY_SCRUB_BUDGET": "8MiB",
            "CANARY_RING_ROWS": "65536",
            **settings,
        }
        self.setup = setup
        self._log = folder / "engine.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(DRIVER), json.dumps({"folder": str(folder / "model"), **setup.options})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**inherited, **canary, **setup.environment, "OMP_NUM_THREADS": "1"},
            )
        self._answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
            if "error" in answer:
                raise RuntimeError(f"{name}: {answer['error']}\n{self.log[-3000:]}")
            return answer["result"]

        return call

    @property
    def log(self) -> str:
        """Everything that the process said on stderr."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # A process that hangs would take the whole run with it.
        watch = threading.Timer(self.setup.patience_s, self._process.kill)
        watch.start()
        line = self._process.stdout.readline()
        watch.cancel()
        if not line:
            raise RuntimeError(f"the engine's process ended with {self._process.wait(60)}\n{self.log[-6000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# All tests of one engine go to the same worker of `pytest -n 2 --dist loadgroup`, so that it starts once.
@pytest.fixture(scope="session", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SETUPS])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine of each of `SETUPS`, guarded, shared by all tests that want it."""
    setup = SETUPS[request.param]
    setup.skip_before()
    process = EngineProcess(setup, tmp_path_factory.mktemp(request.param))
    yield process
    process.close()


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineProcess]]:
    """Starts an engine from the fields of a `Setup`: ``launch({"options": {...}}, CANARY_MODE="log")``, or from a setup
    of `SETUPS` by its name, with some of its fields added to."""
    processes = []

    def launch_engine(fields: dict[str, Any], like: str = "", **settings: str) -> EngineProcess:
        known = vars(SETUPS[like]) if like else {}
        merged = {k: {**known[k], **v} if isinstance(v, dict) and k in known else v for k, v in fields.items()}
        processes.append(EngineProcess(Setup(**{**known, **merged}), tmp_path_factory.mktemp("engine"), **settings))
        return processes[-1]

    yield launch_engine
    for process in processes:
        process.close()


@pytest.fixture(scope="module")
def hicache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine whose prefix cache reaches into host memory, with the read check off as it is by default."""
    process = EngineProcess(SETUPS["hicache"], tmp_path_factory.mktemp("hicache"), CANARY_READ_CHECK="0")
    yield process
    process.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Starts an engine of one's own: ``start("mha", CANARY_MODE="raise")``."""
    processes = []

    def start_engine(name: str, **settings: str) -> EngineProcess:
        setup = {**SETUPS, **SPECULATIVE}[name]
        setup.skip_before()
        processes.append(EngineProcess(setup, tmp_path, **settings))
        return processes[-1]

    yield start_engine
    for process in processes:
        process.close()
