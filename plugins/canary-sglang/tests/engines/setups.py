"""The engines that the tests start: SGLang's options, and traffic that shows what they are for."""

import random
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
from packaging.version import Version

TRITON = {"TRITON_INTERPRET": "1"}


def since(release: str) -> bool:
    """Whether the installed SGLang is ``release`` or a newer one."""
    return find_spec("sglang") is not None and Version(version("sglang")) >= Version(release)


RETRACTS = {"SGLANG_TEST_RETRACT": "1"} if since("0.5.22") else {}
"""For engines whose requests don't fit: from 0.5.22 on SGLang admits fewer, and only its own setting for tests has it
retract some."""

STATES_COVERED_BY = "clean traffic and flips of Mamba-2: all recurrent states are one region, whatever the model"
HICACHE_COVERED_BY = "records that travel and walks through nodes in host memory, without an engine"
SPECULATION_COVERED_BY = "a draft model's batches, without an engine"
"""What CI runs in place of engines for which it has no time."""

MHA_AND_SWA = "all of this with one pool and with a window's"
"""What CI runs beside engines that take turns."""

HICACHE: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
    "max_total_tokens": 160,
}
"""`ServerArgs` of an engine whose pool holds a few prompts; others lie in host memory."""

CHECKPOINTS: dict[str, Any] = {
    "mamba_radix_cache_strategy": "extra_buffer",
    "mamba_track_interval": 64,
    "chunked_prefill_size": 128,
    "max_mamba_cache_size": 32,
}
"""`ServerArgs` under which states as of every 64th token are put aside within prefills and decodes."""

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
    before: str = "99"
    """First SGLang that does so no more."""
    left_out: frozenset[str] = frozenset()
    """Names, up to a slash, of what the coverage event lists as not guarded."""
    shared: int = 40
    """Length of the prefix that many prompts begin with; of pages of 256 tokens only whole ones are ever cached."""
    patience_s: float = 900
    """Most time for one answer of the engine's process, its start included; then it is ended."""
    covered_by: str = ""
    """What CI runs in place of `test_engine` with this engine, for which it has no time; empty where it does."""
    beside: str = ""
    """What CI runs of `test_engine` for each commit, where it runs this engine for one of three; else empty."""
    older_release: bool = False
    """Whether CI runs `test_engine` with it on an older SGLang, too."""
    driver: str = "driver"
    """The module of this package that the engine's process runs."""

    @property
    def served(self) -> tuple[str, ...]:
        """The regions of the model that is served; those of others begin with their name."""
        return tuple(name for name in self.regions if "/" not in name)

    def skip_before(self) -> None:
        """Skips the test on a SGLang that doesn't start this setup."""
        installed = version("sglang")
        if Version(installed) < Version(self.since):
            pytest.skip(f"starts on a CPU from SGLang {self.since} on, this is {installed}")
        if Version(installed) >= Version(self.before):
            pytest.skip(f"runs on a CPU before SGLang {self.before} only, this is {installed}")

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
    environment = {**TRITON, "TORCHDYNAMO_DISABLE": "1", **known.pop("environment", {})}
    return Setup({**eagle, **(options or {})}, environment, **known)


SPECULATIVE = {
    "eagle": speculative(),
    "eagle_tree": speculative({"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}),
    "eagle_layers": speculative({"enable_multi_layer_eagle": True}, regions=("full",)),
    "eagle_pages": speculative({"page_size": 4}),
    "eagle_overlap": speculative({"max_total_tokens": 112, "disable_overlap_schedule": False}),
    "eagle_pressure": speculative(
        {"max_total_tokens": 112, "chunked_prefill_size": 32, "schedule_conservativeness": 0.1},
        environment=RETRACTS,
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
    "mha": Setup(storm_steps=600, older_release=True),
    "pages": Setup({"page_size": 4}, TRITON, storm_steps=200, beside=MHA_AND_SWA),
    "fp8": Setup({"kv_cache_dtype": "fp8_e4m3"}, beside=MHA_AND_SWA),
    "swa": Setup(
        {"model": "cohere2", "swa_full_tokens_ratio": 1.0},
        # Where window slots lie has a say in outputs (`torch_native` looks for them where full slots lie), so it must
        # not depend on how many forwards an engine has done before: by default every 128th of them gives slots up.
        {"SGLANG_SWA_EVICTION_INTERVAL": "1"},
        regions=("full", "swa"),
        storm_steps=500,
        older_release=True,
    ),
    "mla": Setup(
        {"model": "deepseek_v2", "attention_backend": "triton", "dtype": "float32"},
        TRITON,
        prompts=4,
        new_tokens=4,
        storm_steps=20,
        storm_prefix=8,
        beside=MHA_AND_SWA,
    ),
    "pressure": Setup(
        {"max_total_tokens": 112, "chunked_prefill_size": 32, "schedule_conservativeness": 0.1},
        RETRACTS,
        prompts=16,
        new_tokens=24,
        storm_steps=600,
        beside=MHA_AND_SWA,
    ),
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
        left_out=frozenset({"swa", "c4", "c128", "c4_state", "c128_state"}),
        beside=MHA_AND_SWA,
    ),
    "mixed": Setup({"enable_mixed_chunk": True, "chunked_prefill_size": 16}, beside=MHA_AND_SWA),
    "hicache": Setup(
        HICACHE,
        covered_by=HICACHE_COVERED_BY,
    ),
    "short_conv": Setup(
        {"model": "lfm2", "dtype": "float32", "max_mamba_cache_size": 16},
        {**TRITON, "CANARY_BACKEND": "torch"},
        regions=("full", "mamba"),
        covered_by=STATES_COVERED_BY,
    ),
    "mamba2": Setup(
        {"model": "falcon_h1", "dtype": "float32", "max_mamba_cache_size": 16},
        {**TRITON, "CANARY_BACKEND": "torch"},
        prompts=4,
        new_tokens=4,
        regions=("full", "mamba"),
        storm_steps=20,
        beside=MHA_AND_SWA,
    ),
    "gated_delta": Setup(
        {"model": "qwen3_5", "dtype": "float16", "max_mamba_cache_size": 16},
        {**TRITON, "CANARY_BACKEND": "torch", "SGLANG_MAMBA_CONV_DTYPE": "float16"},
        prompts=4,
        new_tokens=4,
        regions=("full", "mamba"),
        storm_steps=8,
        covered_by=STATES_COVERED_BY,
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
        before="0.5.22",
        covered_by=STATES_COVERED_BY,
    ),
    "radix_off": Setup({"disable_radix_cache": True}, beside=MHA_AND_SWA),
}


def conformance(name: str) -> Setup:
    """A process that runs the conformance suite on engines like one of `SETUPS`."""
    return Setup({"suite": name}, SETUPS[name].environment, since=SETUPS[name].since, driver="conformance")
